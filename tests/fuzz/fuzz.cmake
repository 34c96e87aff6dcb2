# SPDX-License-Identifier: Apache-2.0
#
# Fuzz targets: the rows of targets.list. With HVD_FUZZ each is a libFuzzer program and a test that
# fuzzes for HVD_FUZZ_SECONDS (environment, 15 by default); without it each is linked with replay.c
# and reads its corpus once.
set(fuzz_list ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/targets.list)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${fuzz_list})
file(STRINGS ${fuzz_list} rows REGEX "^[^#]")
foreach(row IN LISTS rows)
    string(REPLACE "|" ";" cells "${row}")
    list(TRANSFORM cells STRIP)
    list(POP_FRONT cells name max_bytes)
    set(program fuzz_${name})
    set(corpus ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/corpus/${name})
    add_executable(${program} ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/${program}.c)
    target_link_libraries(${program} PRIVATE hvd_pai)
    set_target_properties(${program} PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
    if(HVD_FUZZ)
        target_link_options(${program} PRIVATE -fsanitize=fuzzer)
        add_test(NAME ${program} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tools/fuzz.sh
            $<TARGET_FILE:${program}> ${corpus} ${CMAKE_CURRENT_BINARY_DIR}/fuzz ${max_bytes})
        set_tests_properties(${program} PROPERTIES TIMEOUT 86400 LABELS fuzz
            PROCESSORS 2)
    else()
        target_sources(${program} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/replay.c)
        add_test(NAME replay_${name} COMMAND ${program} ${corpus})
        hvd_test_properties(replay_${name} 120 "" "unit")
    endif()
endforeach()
