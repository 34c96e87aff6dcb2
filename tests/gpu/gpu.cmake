# SPDX-License-Identifier: Apache-2.0
#
# The simulated GPU (tests/gpu/README.md): a library for each major version of CUDA, which stands in
# for libcuda, libcudart and libnccl, and its own test. tests/gpu/lib has it under the names that
# programs load at run time.
file(GLOB gpusim_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/*.c)
file(GLOB gpu_test_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/test_*.c)
list(REMOVE_ITEM gpusim_sources ${gpu_test_sources})

set(gpusim_directory ${CMAKE_CURRENT_BINARY_DIR}/tests/gpu)
foreach(cuda 12 13)
    add_library(gpusim${cuda} SHARED ${gpusim_sources})
    target_compile_definitions(gpusim${cuda} PRIVATE GPUSIM_CUDA=${cuda})
    target_link_libraries(gpusim${cuda} PRIVATE hvd_flags)
    set_target_properties(gpusim${cuda} PROPERTIES
        C_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY ${gpusim_directory})
endforeach()
foreach(name lib/libcuda.so.1 lib/libnccl.so.2 lib-without-nccl/libcuda.so.1)
    cmake_path(GET name PARENT_PATH folder)
    add_custom_command(TARGET gpusim13 POST_BUILD
        COMMAND ${CMAKE_COMMAND} -E make_directory ${gpusim_directory}/${folder}
        COMMAND ${CMAKE_COMMAND} -E create_symlink ../libgpusim13.so ${gpusim_directory}/${name}
        VERBATIM)
endforeach()

# The same under the names of AMD's libraries: RCCL's functions are called as NCCL's are.
add_library(gpusim_hip SHARED ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/hip/hip.c)
target_link_libraries(gpusim_hip PRIVATE hvd_flags gpusim13)
set_target_properties(gpusim_hip PROPERTIES
    C_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY ${gpusim_directory})
add_custom_command(TARGET gpusim_hip POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E make_directory ${gpusim_directory}/lib-hip
    COMMAND ${CMAKE_COMMAND} -E create_symlink ../libgpusim_hip.so
            ${gpusim_directory}/lib-hip/libamdhip64.so.6
    COMMAND ${CMAKE_COMMAND} -E create_symlink ../libgpusim13.so
            ${gpusim_directory}/lib-hip/librccl.so.1
    VERBATIM)

add_executable(test_gpusim ${gpusim_sources} ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/test_sim.c)
target_link_libraries(test_gpusim PRIVATE hvd_flags PkgConfig::cmocka)
set_target_properties(test_gpusim PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)

# The library under test finds the simulation as libcuda.so.1 in tests/gpu/lib (LD_LIBRARY_PATH).
foreach(test test_device test_nccl)
    hvd_test_program(${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu/${test}.c)
    target_link_libraries(${test} PRIVATE rank_helpers gpusim13)
    target_include_directories(${test} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks)
    add_dependencies(${test} gpusim_hip)
endforeach()
