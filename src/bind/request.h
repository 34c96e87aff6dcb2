// SPDX-License-Identifier: Apache-2.0
//
// request.h - what every binding that fills a request needs.
#ifndef HVD_BIND_REQUEST_H
#define HVD_BIND_REQUEST_H

#include "hvd.h"

static inline void request_set_scales(hvd_request_t *request, double prescale, double postscale)
{
    request->prescale = prescale;
    request->postscale = postscale;
    if (prescale != 1.0 || postscale != 1.0) {
        request->flags |= HVD_SCALED;
    }
}

#endif
