# SPDX-License-Identifier: Apache-2.0
#
# The Python side: the extension horovod._core, in the limited API, so that one binary serves every
# Python from 3.11 on (an older one builds its own), and libhvd_tf.so for TensorFlow. No framework
# is needed to build them.
#
# In an ordinary build <build>/python/horovod is the package: links to the sources of
# python/horovod beside the extension and the library, for PYTHONPATH or a .pth file.
find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter Development.Module)

file(GLOB bind_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/bind/core*.c)
Python3_add_library(hvd_python MODULE ${bind_sources})
target_link_libraries(hvd_python PRIVATE hvd_flags hvd)
target_compile_options(hvd_python PRIVATE -Wmissing-prototypes)
set(extension_suffix ".abi3.so")
if(Python3_VERSION VERSION_LESS 3.11)
    set(extension_suffix ".${Python3_SOABI}.so")
else()
    target_compile_definitions(hvd_python PRIVATE Py_LIMITED_API=0x030b0000)
endif()

set(package_directory ${CMAKE_CURRENT_BINARY_DIR}/python/horovod)
set_target_properties(hvd_python PROPERTIES
    OUTPUT_NAME _core PREFIX "" SUFFIX "${extension_suffix}"
    C_VISIBILITY_PRESET hidden
    LIBRARY_OUTPUT_DIRECTORY ${package_directory}
    BUILD_RPATH ${CMAKE_CURRENT_BINARY_DIR} INSTALL_RPATH "$ORIGIN")

# TensorFlow's operations, a library of their own because TensorFlow must load it itself.
file(GLOB tf_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/bind/tf_*.c)
add_library(hvd_tf MODULE ${tf_sources})
target_link_libraries(hvd_tf PRIVATE hvd_flags hvd)
target_compile_options(hvd_tf PRIVATE -Wmissing-prototypes)
set_target_properties(hvd_tf PROPERTIES
    C_VISIBILITY_PRESET hidden
    LIBRARY_OUTPUT_DIRECTORY ${package_directory}
    BUILD_RPATH ${CMAKE_CURRENT_BINARY_DIR} INSTALL_RPATH "$ORIGIN")

if(SKBUILD)
    # A wheel has no links between files, so the library bears the name it is looked for.
    set_target_properties(hvd PROPERTIES VERSION ${PROJECT_VERSION_MAJOR})
    install(TARGETS hvd_python hvd_tf hvd LIBRARY DESTINATION horovod NAMELINK_SKIP)
    install(TARGETS horovodrun RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR})
    add_custom_command(TARGET horovodrun POST_BUILD VERBATIM
        COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tools/man-pages $<TARGET_FILE:horovodrun>
                ${CMAKE_CURRENT_BINARY_DIR}/man)
    install(DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/man/
            DESTINATION ${SKBUILD_DATA_DIR}/share/man/man1)
else()
    file(MAKE_DIRECTORY ${package_directory})
    file(GLOB package_entries CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/python/horovod/*)
    foreach(entry IN LISTS package_entries)
        cmake_path(GET entry FILENAME name)
        if(NOT name STREQUAL "__pycache__")
            file(CREATE_LINK ${entry} ${package_directory}/${name} SYMBOLIC)
        endif()
    endforeach()
endif()
