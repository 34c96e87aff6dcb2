# SPDX-License-Identifier: Apache-2.0
#
# cmake -DOUT=file.c -DFROM=folder -P embed.cmake: the files of the page as C arrays;
# several of one kind behind each other.
file(WRITE ${OUT}.new "#include \"web/page_files.h\"\n")
foreach(part html:page.html style:style.css script:tools.js,timeline.js,page.js)
    string(REPLACE ":" ";" pair ${part})
    list(GET pair 0 name)
    list(GET pair 1 files)
    string(REPLACE "," ";" files "${files}")
    set(hex)
    foreach(file IN LISTS files)
        file(READ ${FROM}/${file} more HEX)
        string(APPEND hex "${more}")
    endforeach()
    string(LENGTH "${hex}" digits)
    math(EXPR bytes "${digits} / 2")
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," array "${hex}")
    file(APPEND ${OUT}.new "const char page_${name}[] = {${array}};\n"
         "const size_t page_${name}_bytes = ${bytes};\n")
endforeach()
file(RENAME ${OUT}.new ${OUT})
