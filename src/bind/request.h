// SPDX-License-Identifier: Apache-2.0
//
// request.h - what every binding does to a request it fills, for Python and TensorFlow alike: a
// factor that is not 1 has to be announced in the flags, too.
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
