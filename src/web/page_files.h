// SPDX-License-Identifier: Apache-2.0
//
// page_files.h - the files in page/, as the build embeds them (embed.cmake).
//
// Constant; private to web/.
#ifndef HVD_WEB_PAGE_FILES_H
#define HVD_WEB_PAGE_FILES_H

#include <stddef.h>

extern const char page_html[], page_style[], page_script[];
extern const size_t page_html_bytes, page_style_bytes, page_script_bytes;

#endif
