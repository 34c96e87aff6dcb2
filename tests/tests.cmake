# SPDX-License-Identifier: Apache-2.0
#
# Which tests exist: every tests/unit/test_*.c, every row of tests/tests.list, the corpus of every
# row of tests/fuzz/targets.list, checks of what the compiler and linker made (exported symbols,
# hardening) and one of the style checker itself.
#
# A row is `name | command with arguments | environment | timeout seconds | labels`; lines that are
# empty or start with # are skipped. In the command a word that names a program of this build
# becomes its path; there and in the environment @source@ and @build@ become the two directories.
# Environment (NAME=value) and labels are separated by blanks and may be empty. Some labels mean
# something here:
#   serial        no other test runs at the same time
#   busy, and the kinds ranks, gpu, python: keeps processors busy, so as many run as there are; of
#                 the others, which wait most of the time, twice as many
#   no-sanitize   left out of instrumented builds
#   long          run by make test-long only
#   quick         run by make check too, as is whatever has the label unit
#   once          in the plain build with gcc only: what it tests is not compiled
find_package(PkgConfig REQUIRED)
pkg_check_modules(cmocka REQUIRED IMPORTED_TARGET cmocka)

# Instrumented programs are slower, and stop at the first finding.
set(time_factor 1)
set(sanitize_environment "")
if(HVD_SANITIZE OR HVD_COVERAGE)
    set(time_factor 4)
endif()
if(HVD_SANITIZE)
    set(sanitize_environment
        ASAN_OPTIONS=abort_on_error=0:detect_stack_use_after_return=1:allocator_may_return_null=1
        UBSAN_OPTIONS=print_stacktrace=1
        TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:die_after_fork=0)
endif()

set(busy_labels busy ranks gpu python)

function(hvd_test_properties name timeout environment labels)
    math(EXPR seconds "${timeout} * ${time_factor}")
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 # "not tested", and why
        TIMEOUT ${seconds} LABELS "${labels}" ENVIRONMENT "${sanitize_environment};${environment}"
        COST ${timeout}) # the longest first, or they run alone at the end
    if("serial" IN_LIST labels)
        set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
    endif()
    foreach(label IN LISTS labels)
        if(label IN_LIST busy_labels)
            set_tests_properties(${name} PROPERTIES PROCESSORS 2)
        endif()
    endforeach()
endfunction()

# Turns one row of tests.list into a ctest.
function(hvd_test_row row)
    string(REPLACE "|" ";" cells "${row}")
    list(LENGTH cells n_cells)
    if(NOT n_cells EQUAL 5)
        message(FATAL_ERROR "tests/tests.list: ${n_cells} cells instead of 5 in: ${row}")
    endif()
    list(TRANSFORM cells STRIP)
    list(POP_FRONT cells name command environment timeout labels)
    if(NOT timeout MATCHES "^[1-9][0-9]*$")
        message(FATAL_ERROR
                "tests/tests.list: \"${timeout}\" is not a timeout in seconds in: ${row}")
    endif()
    string(REPLACE "@source@" "${CMAKE_CURRENT_SOURCE_DIR}" command "${command}")
    string(REPLACE "@build@" "${CMAKE_CURRENT_BINARY_DIR}" command "${command}")
    string(REPLACE "@build@" "${CMAKE_CURRENT_BINARY_DIR}" environment "${environment}")
    separate_arguments(command UNIX_COMMAND "${command}")
    separate_arguments(environment UNIX_COMMAND "${environment}")
    separate_arguments(labels UNIX_COMMAND "${labels}")
    if(HVD_SANITIZE AND "no-sanitize" IN_LIST labels)
        return()
    endif()
    if("once" IN_LIST labels AND (HVD_SANITIZE OR NOT CMAKE_C_COMPILER_ID STREQUAL "GNU"))
        return()
    endif()
    set(words "")
    foreach(word IN LISTS command)
        if(TARGET "${word}")
            list(APPEND words $<TARGET_FILE:${word}>)
        else()
            list(APPEND words "${word}")
        endif()
    endforeach()
    add_test(NAME ${name} COMMAND ${words})
    hvd_test_properties(${name} ${timeout} "${environment}" "${labels}")
endfunction()

function(hvd_test_program source)
    cmake_path(GET source STEM name)
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE hvd_pai PkgConfig::cmocka)
    set_target_properties(${name} PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
endfunction()

file(GLOB unit_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/unit/test_*.c)
foreach(source IN LISTS unit_sources)
    hvd_test_program(${source})
    cmake_path(GET source STEM name)
    add_test(NAME ${name} COMMAND ${name})
    hvd_test_properties(${name} 120 "" "unit")
endforeach()

target_link_libraries(test_simulate PRIVATE hvd_simulate)

# What test_launched finds instead of a real PMIx library.
add_library(fake_pmix SHARED ${CMAKE_CURRENT_SOURCE_DIR}/tests/unit/fake_pmix.c)
target_link_libraries(fake_pmix PRIVATE hvd_flags)
set(fake_pmix_prefix ${CMAKE_CURRENT_BINARY_DIR}/tests/fake_pmix)
set_target_properties(fake_pmix PROPERTIES
    OUTPUT_NAME pmix VERSION 2 SOVERSION 2 LIBRARY_OUTPUT_DIRECTORY ${fake_pmix_prefix}/lib)
target_compile_definitions(test_launched PRIVATE FAKE_PMIX_PREFIX="${fake_pmix_prefix}")
add_dependencies(test_launched fake_pmix)

# Programs that start ranks of their own share what the other files of tests/ranks hold.
file(GLOB rank_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks/test_*.c)
file(GLOB fault_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fault/test_*.c)
file(GLOB security_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/security/test_*.c)
file(GLOB rank_helpers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks/*.c)
list(REMOVE_ITEM rank_helpers ${rank_sources})
add_library(rank_helpers OBJECT ${rank_helpers})
target_link_libraries(rank_helpers PUBLIC hvd_flags)
set(scene_definitions SCENE_SOURCE_DIR="${CMAKE_CURRENT_SOURCE_DIR}"
    SCENE_BUILD_DIR="${CMAKE_CURRENT_BINARY_DIR}")
target_compile_definitions(rank_helpers PRIVATE ${scene_definitions})
# The same for tests in Python.
add_library(scene SHARED ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks/scene.c)
target_compile_definitions(scene PRIVATE ${scene_definitions})
target_link_libraries(scene PRIVATE hvd_flags)
set_target_properties(scene PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
foreach(source IN LISTS rank_sources)
    hvd_test_program(${source})
    cmake_path(GET source STEM name)
    target_link_libraries(${name} PRIVATE rank_helpers)
endforeach()

# So do those that break something or break in; what they share besides is in the other files of
# tests/fault.
file(GLOB fault_helpers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fault/*.c)
list(REMOVE_ITEM fault_helpers ${fault_sources})
add_library(fault_helpers OBJECT ${fault_helpers})
target_include_directories(fault_helpers PUBLIC
    ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks ${CMAKE_CURRENT_SOURCE_DIR}/tests/fault)
target_link_libraries(fault_helpers PUBLIC hvd_flags)
foreach(source IN LISTS fault_sources security_sources)
    hvd_test_program(${source})
    cmake_path(GET source STEM name)
    target_link_libraries(${name} PRIVATE rank_helpers fault_helpers)
endforeach()

# What test_cost.py counts the instructions of.
hvd_test_program(${CMAKE_CURRENT_SOURCE_DIR}/tests/cost/cost_ops.c)

include(tests/gpu/gpu.cmake)

set(test_list ${CMAKE_CURRENT_SOURCE_DIR}/tests/tests.list)
if(EXISTS ${test_list})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${test_list})
    file(STRINGS ${test_list} rows REGEX "^[^#]")
    foreach(row IN LISTS rows)
        hvd_test_row("${row}")
    endforeach()
endif()

include(tests/fuzz/fuzz.cmake)

# What has nothing to instrument runs once, in the plain builds.
if(NOT HVD_SANITIZE)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    add_test(NAME exports COMMAND ${Python3_EXECUTABLE}
        ${CMAKE_CURRENT_SOURCE_DIR}/tools/check-exports $<TARGET_FILE:hvd>)
    hvd_test_properties(exports 60 "" "unit")
    add_test(NAME hardening COMMAND ${Python3_EXECUTABLE}
        ${CMAKE_CURRENT_SOURCE_DIR}/tools/check-hardening
        $<TARGET_FILE:hvd> $<TARGET_FILE:hvd-info> $<TARGET_FILE:horovodrun>)
    hvd_test_properties(hardening 60 "" "unit")
    add_test(NAME style_rules COMMAND ${Python3_EXECUTABLE}
        ${CMAKE_CURRENT_SOURCE_DIR}/tools/check-style --self-test)
    hvd_test_properties(style_rules 60 "" "unit")
endif()

# The page of a job that is made up, for tests/dashboard.
add_executable(dashboard_simulate ${CMAKE_CURRENT_SOURCE_DIR}/tests/dashboard/simulate.c)
target_link_libraries(dashboard_simulate PRIVATE hvd_launch)
set_target_properties(dashboard_simulate PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
