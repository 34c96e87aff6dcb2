// SPDX-License-Identifier: Apache-2.0
//
// mismatch.c - the sentences for submissions that cannot run: what differs, on which ranks.
//
// Two signatures are compared property by property, in a fixed order, and the first that differs
// makes the sentence; a row of the table is a property. The beginnings ("Mismatched data types:")
// are what users' programs look for; the rest names both ranks, both values and the tensor.
// Pure functions, used by the sequencer only.
#include "coord/internal.h"

#include <stdio.h>

#define VALUE_BYTES 256
#define MAX_NAME_SHOWN 256 // longer names are cut in sentences

typedef bool (*differs_fn)(const signature_t *a, const signature_t *b);
typedef void (*describe_fn)(const signature_t *signature, int tensor, char text[VALUE_BYTES]);

// --- Properties ---------------------------------------------------------------------------------

static bool dtype_differs(const signature_t *a, const signature_t *b)
{
    return a->dtype != b->dtype;
}

static void describe_dtype(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    snprintf(text, VALUE_BYTES, "%s", hvd_dtype_name(signature->dtype));
}

static bool op_differs(const signature_t *a, const signature_t *b)
{
    return a->op != b->op;
}

static void describe_op(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    snprintf(text, VALUE_BYTES, "%s", op_infos[signature->op].upper);
}

static bool words_differ(const signature_t *a, const signature_t *b)
{
    return a->n_dims_words != b->n_dims_words ||
           memcmp(a->dims, b->dims, (size_t)a->n_dims_words * sizeof *a->dims) != 0;
}

static bool sets_differ(const signature_t *a, const signature_t *b)
{
    return op_is_about_sets(a->op) && words_differ(a, b);
}

static bool count_differs(const signature_t *a, const signature_t *b)
{
    return a->n_tensors != b->n_tensors;
}

static void describe_count(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    snprintf(text, VALUE_BYTES, "%d tensor%s", signature->n_tensors,
             signature->n_tensors == 1 ? "" : "s");
}

static void describe_numbers(const int64_t *numbers, int64_t n, char text[VALUE_BYTES])
{
    size_t len = (size_t)snprintf(text, VALUE_BYTES, "[");
    for (int64_t i = 0; i < n; i++) {
        const char *comma = i > 0 ? ", " : "";
        char number[24];
        // A dimension that may differ between ranks is not shown.
        snprintf(number, sizeof number, numbers[i] < 0 ? "*" : "%lld", (long long)numbers[i]);
        if (len + strlen(number) + 8 > VALUE_BYTES) {
            len += (size_t)snprintf(text + len, VALUE_BYTES - len, ", ...");
            break;
        }
        len += (size_t)snprintf(text + len, VALUE_BYTES - len, "%s%s", comma, number);
    }
    snprintf(text + len, VALUE_BYTES - len, "]");
}

static const int64_t *shape_of(const signature_t *signature, int tensor)
{
    const int64_t *at = signature->dims;
    while (tensor-- > 0) {
        at += 1 + at[0];
    }
    return at;
}

static void describe_shape(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    const int64_t *shape = shape_of(signature, tensor);
    describe_numbers(shape + 1, shape[0], text);
}

static void describe_set(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    describe_numbers(signature->dims, signature->n_dims_words, text);
}

static bool scale_differs(const signature_t *a, const signature_t *b)
{
    return memcmp(&a->prescale, &b->prescale, sizeof(double)) != 0 ||
           memcmp(&a->postscale, &b->postscale, sizeof(double)) != 0;
}

static void describe_scale(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    snprintf(text, VALUE_BYTES, "prescale %.17g, postscale %.17g", signature->prescale,
             signature->postscale);
}

static bool reduce_differs(const signature_t *a, const signature_t *b)
{
    return a->reduce != b->reduce;
}

static void describe_reduce(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    snprintf(text, VALUE_BYTES, "%s", hvd_reduce_name(signature->reduce));
}

static bool root_differs(const signature_t *a, const signature_t *b)
{
    return a->root != b->root;
}

static void describe_root(const signature_t *signature, int tensor, char text[VALUE_BYTES])
{
    (void)tensor;
    snprintf(text, VALUE_BYTES, "root %d", signature->root);
}

// In the order in which they are checked.
static const struct {
    differs_fn differs;
    describe_fn describe;
    const char *title; // %s: the operation
    const char *what;  // to be the same
} properties[] = {
    {dtype_differs, describe_dtype, "Mismatched data types:", "data type"},
    {op_differs, describe_op, "Mismatched operations:", "operation"},
    {sets_differ, describe_set, "Mismatched process sets:", "ranks or id"},
    {count_differs, describe_count, "Mismatched %s tensor shapes:", "number of tensors"},
    {words_differ, describe_shape, "Mismatched %s tensor shapes:", "shape"},
    {scale_differs, describe_scale, "Mismatched prescale and/or postscale factors:", "factors"},
    {reduce_differs, describe_reduce, "Mismatched reduction operation:", "reduction"},
    {root_differs, describe_root, "Mismatched %s root ranks:", "root rank"},
};

// --- Sentences ----------------------------------------------------------------------------------

// The first tensor of a group whose shapes differ.
static int differing_tensor(const signature_t *a, const signature_t *b)
{
    for (int tensor = 0; tensor < MIN(a->n_tensors, b->n_tensors); tensor++) {
        const int64_t *x = shape_of(a, tensor), *y = shape_of(b, tensor);
        if (x[0] != y[0] || memcmp(x, y, (size_t)(x[0] + 1) * sizeof *x) != 0) {
            return tensor;
        }
    }
    return 0;
}

static void name_of_tensor(const entry_t *entry, const signature_t *signature, int tensor,
                           char *text, size_t bytes)
{
    if (op_is_about_sets(signature->op)) {
        snprintf(text, bytes, "a process set");
    } else if (signature->n_tensors > 1) {
        snprintf(text, bytes, "tensor %d of group '%.*s'", tensor, MAX_NAME_SHOWN, entry->name);
    } else {
        snprintf(text, bytes, "tensor '%.*s'", MAX_NAME_SHOWN, entry->name);
    }
}

hvd_status_t mismatch_of_variants(const entry_t *entry, err_t *err)
{
    const variant_t *first = &entry->variants[0], *second = &entry->variants[1];
    const signature_t *a = &first->sig->view, *b = &second->sig->view;
    char title[64], mine[VALUE_BYTES], other[VALUE_BYTES], name[MAX_NAME_SHOWN + 64];
    size_t i = 0;
    while (i < N_ELEMENTS(properties) && !properties[i].differs(a, b)) {
        i++;
    }
    if (i == N_ELEMENTS(properties)) { // every row is the same: only the memory differs
        return fail(err, HVD_UNSUPPORTED, "some ranks have '%.*s' on a GPU and others do not",
                    MAX_NAME_SHOWN, entry->name);
    }
    bool shapes_comparable = a->op == b->op && !op_is_about_sets(a->op);
    int tensor = shapes_comparable ? differing_tensor(a, b) : 0;
    snprintf(title, sizeof title, properties[i].title, op_infos[a->op].upper);
    properties[i].describe(a, tensor, mine);
    properties[i].describe(b, tensor, other);
    name_of_tensor(entry, a, tensor, name, sizeof name);
    const char *dot = strchr(entry->name, '.'); // behind the operation, where counted names have it
    const char *advice = dot == NULL || strncmp(dot, ".noname.", 8) != 0
                             ? ""
                             : " It was given no name, so ranks match it by the order of their "
                               "calls: make the same calls in the same order, or pass name=.";
    return fail(err, HVD_MISMATCH,
                "%s rank %d submitted %s and rank %d %s for %s. Make every rank submit the same %s "
                "under the same name.%s",
                title, first->rank, mine, second->rank, other, name, properties[i].what, advice);
}

hvd_status_t mismatch_of_join(const coord_t *coord, const entry_t *entry, err_t *err)
{
    SEQUENCER(coord);
    const set_t *set = entry->set;
    int joined = 0;
    while (joined + 1 < set->n_ranks && !coord->joins.has_joined[set->ranks[joined]]) {
        joined++;
    }
    return fail(err, HVD_JOINED,
                "%s is not supported with Join at this time. Rank %d has joined and cannot take "
                "part in '%.*s': call it before the first rank joins, or after all have.",
                op_infos[entry->variants[0].sig->view.op].title, set->ranks[joined], MAX_NAME_SHOWN,
                entry->name);
}

hvd_status_t mismatch_of_scalars(const entry_t *entry, err_t *err)
{
    const kept_sig_t *sig = entry->variants[0].sig;
    for (int tensor = 0; tensor < sig->view.n_tensors; tensor++) {
        if (shape_of(&sig->view, tensor)[0] == 0) {
            return fail(err, HVD_MISMATCH,
                        "Process-set rank zero tried to %s a rank-zero tensor. Tensor '%.*s' is a "
                        "scalar: reshape it to one dimension on every rank.",
                        op_infos[sig->view.op].upper, MAX_NAME_SHOWN, entry->name);
        }
    }
    return HVD_OK;
}
