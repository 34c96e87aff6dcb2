// SPDX-License-Identifier: Apache-2.0
//
// control.c - reads and writes the lines of the agreement.
//
// Which fields a kind has is a table: a row lists them in wire order, and one loop each reads and
// writes any line, so the two cannot drift apart. Shapes and sizes are varints on the wire and
// become int64_t words in a buffer that the reader keeps; since it may move while a line is read,
// pointers into it are set when the line is whole. The cost is one pass over the bytes; no memory
// is taken once the buffer has grown.
#include "wire/control.h"

#define KIND_MASK 0x1f
#define FLAG_ZEROS 0x20 // also: every entry of a RUN brings its result
#define FLAG_SIZES 0x40
#define FLAG_PAYLOAD 0x80

#define RUN_NAMED 0x01
#define RUN_SIZES 0x02
#define RUN_RESULT 0x04
#define RUN_FLAGS (RUN_NAMED | RUN_SIZES | RUN_RESULT)

#define SIGNATURE_SCALED 0x80 // in the byte of the operation
#define SIGNATURE_ON_DEVICE 0x40
#define MAX_STATUS_CODE 127 // statuses are small negative numbers

typedef enum field {
    FIELD_END,
    // Numbers: a row each in `numbers`.
    FIELD_ID,
    FIELD_BATCH,
    FIELD_SET,
    FIELD_RANK,
    FIELD_AGE,
    FIELD_INQUIRY,
    FIELD_BLOCKED,
    FIELD_SUBMITTED,
    FIELD_IN_FLIGHT,
    FIELD_QUIET,
    FIELD_LEAST,
    FIELD_LONGEST,
    N_NUMBERS,
    // Everything else: a case each in get_field and put_field.
    FIELD_STATUS = N_NUMBERS,
    FIELD_NAME,
    FIELD_TEXT,
    FIELD_SIGNATURE,
    FIELD_TWO_SIGNATURES,
    FIELD_EXAMPLE, // only when members have joined: otherwise every member is one
    FIELD_SIZES,   // only with FLAG_SIZES
    FIELD_PAYLOAD, // only with FLAG_PAYLOAD
    FIELD_ITEMS,
    FIELD_ASKED,
    FIELD_RANKS,
    FIELD_BITMAPS,
} field_t;

#define MAX_FIELDS 6

// Where a number lies in a line, and how large it may be: 4 bytes, or 8 for whatever has no limit.
#define NUMBER(member, max) {offsetof(control_line_t, member), max}
static const struct {
    uint16_t at;
    uint64_t max;
} numbers[N_NUMBERS] = {
    [FIELD_ID] = NUMBER(id, UINT32_MAX),
    [FIELD_BATCH] = NUMBER(batch, UINT64_MAX),
    [FIELD_SET] = NUMBER(set, UINT32_MAX),
    [FIELD_RANK] = NUMBER(rank, CONTROL_MAX_RANKS),
    [FIELD_AGE] = NUMBER(age_ns, UINT64_MAX),
    [FIELD_INQUIRY] = NUMBER(inquiry, UINT32_MAX),
    [FIELD_BLOCKED] = NUMBER(n_blocked, CONTROL_MAX_RANKS),
    [FIELD_SUBMITTED] = NUMBER(n_submitted, UINT64_MAX),
    [FIELD_IN_FLIGHT] = NUMBER(n_in_flight, UINT32_MAX),
    [FIELD_QUIET] = NUMBER(quiet_ns, UINT64_MAX),
    [FIELD_LEAST] = NUMBER(least_ns, UINT64_MAX),
    [FIELD_LONGEST] = NUMBER(longest_ns, UINT64_MAX),
};

typedef struct shape_of_kind {
    uint8_t flags; // allowed
    uint8_t fields[MAX_FIELDS + 1];
} shape_of_kind_t;

static const shape_of_kind_t kinds[CONTROL_N_KINDS] = {
    [LINE_READY] = {FLAG_ZEROS | FLAG_SIZES | FLAG_PAYLOAD,
                    {FIELD_ID, FIELD_EXAMPLE, FIELD_SIZES, FIELD_PAYLOAD}},
    [LINE_NEW] = {FLAG_ZEROS | FLAG_SIZES | FLAG_PAYLOAD,
                  {FIELD_SET, FIELD_NAME, FIELD_SIGNATURE, FIELD_SIZES, FIELD_PAYLOAD}},
    [LINE_CONFLICT] = {FLAG_ZEROS, {FIELD_SET, FIELD_NAME, FIELD_TWO_SIGNATURES}},
    [LINE_JOIN] = {0, {FIELD_RANK}},
    [LINE_EVICTED] = {0, {FIELD_ID}},
    [LINE_STALLED] = {0, {FIELD_SET, FIELD_NAME, FIELD_AGE}},
    [LINE_ANSWER] = {0, {FIELD_INQUIRY, FIELD_ASKED, FIELD_BITMAPS, FIELD_BLOCKED, FIELD_TEXT}},
    [LINE_STOP] = {0, {FIELD_RANK, FIELD_TEXT}},
    [RECORD_RUN] = {FLAG_ZEROS, {FIELD_BATCH, FIELD_SET, FIELD_ITEMS}},
    [RECORD_ERROR] = {0, {FIELD_BATCH, FIELD_SET, FIELD_NAME, FIELD_STATUS, FIELD_TEXT}},
    [RECORD_EVICT] = {0, {FIELD_ID}},
    [RECORD_JOINED] = {0, {FIELD_BATCH, FIELD_RANK}},
    [RECORD_SET_ADD] = {0, {FIELD_BATCH, FIELD_SET, FIELD_NAME, FIELD_RANKS}},
    [RECORD_SET_REMOVE] = {0, {FIELD_BATCH, FIELD_SET, FIELD_NAME}},
    [RECORD_INQUIRE] = {0, {FIELD_INQUIRY, FIELD_ASKED}},
    [RECORD_REPORT] = {0, {FIELD_BATCH, FIELD_STATUS, FIELD_TEXT}},
    [RECORD_SHUTDOWN] = {0, {FIELD_BATCH, FIELD_RANK, FIELD_TEXT}},
    [LINE_ABORT] = {0, {FIELD_STATUS, FIELD_RANK, FIELD_TEXT}},
    [LINE_HEARTBEAT] = {0, {FIELD_SUBMITTED, FIELD_IN_FLIGHT, FIELD_QUIET, FIELD_NAME}},
    [LINE_PROGRESS] = {0, {FIELD_BATCH, FIELD_LEAST, FIELD_LONGEST, FIELD_TEXT}},
    [RECORD_OFFER] = {FLAG_PAYLOAD, {FIELD_ID, FIELD_PAYLOAD}},
};

// --- Frames -------------------------------------------------------------------------------------

hvd_status_t frame_read(const uint8_t *data, size_t bytes, size_t *body_bytes_p, err_t *err)
{
    if (bytes < FRAME_HEADER_BYTES) {
        return HVD_IN_PROGRESS;
    }
    reader_t in = reader_of(data, FRAME_HEADER_BYTES);
    size_t body_bytes = get_u32(&in);
    if (body_bytes > FRAME_MAX_BYTES) {
        return fail(err, HVD_PROTOCOL,
                    "a frame of %zu bytes was announced; at most %zu are allowed", body_bytes,
                    FRAME_MAX_BYTES);
    }
    *body_bytes_p = body_bytes;
    return bytes - FRAME_HEADER_BYTES < body_bytes ? HVD_IN_PROGRESS : HVD_OK;
}

void frame_write_header(uint8_t header[FRAME_HEADER_BYTES], size_t body_bytes)
{
    for (int i = 0; i < FRAME_HEADER_BYTES; i++) {
        header[i] = (uint8_t)(body_bytes >> 8 * i);
    }
}

// --- Reading ------------------------------------------------------------------------------------

void control_open(control_reader_t *reader, const void *body, size_t bytes)
{
    reader->in = reader_of(body, bytes);
    reader->line_at = body;
    buf_clear(&reader->words);
}

void control_reader_free(control_reader_t *reader)
{
    buf_free(&reader->words);
}

// get_count for numbers that mostly fit one byte.
static inline uint64_t get_small(reader_t *in, uint64_t max)
{
    if (LIKELY(in->at < in->end && *in->at < 0x80 && *in->at <= max && !in->bad)) {
        return *in->at++;
    }
    return get_count(in, max);
}

static control_text_t get_text(reader_t *in, size_t max_bytes)
{
    size_t bytes = get_count(in, max_bytes);
    const uint8_t *at = get_bytes(in, bytes);
    return (control_text_t){.at = at != NULL ? (const char *)at : "",
                            .bytes = at != NULL ? bytes : 0};
}

// Reads a count and as many numbers, each written as itself minus `least`, to the words. Returns
// where they begin; *n_p: how many. Every number takes at least a byte, which bounds the memory.
static size_t get_words(control_reader_t *reader, size_t max_n, int64_t least, int *n_p)
{
    size_t begin = reader->words.len;
    size_t n = get_count(&reader->in, MIN(max_n, reader_left(&reader->in)));
    int64_t *words = buf_append(&reader->words, NULL, n * sizeof *words);
    *n_p = 0;
    if (words == NULL || reader->in.bad) {
        return begin;
    }
    for (size_t i = 0; i < n; i++) {
        words[i] = (int64_t)get_count(&reader->in, INT64_MAX) + least;
    }
    *n_p = (int)n;
    return begin;
}

static const int64_t *words_at(const control_reader_t *reader, size_t begin)
{
    return (const int64_t *)(const void *)(reader->words.data + begin);
}

bool control_words_are_shapes(const int64_t *words, int n_words, int n_tensors)
{
    int at = 0;
    for (int tensor = 0; tensor < n_tensors; tensor++) {
        if (at >= n_words || words[at] < 0 || words[at] > HVD_MAX_DIMS ||
            words[at] > n_words - at - 1) {
            return false;
        }
        int n_dims = (int)words[at];
        for (int d = 1; d < n_dims; d++) {
            if (words[at + 1 + d] < 0) {
                return false;
            }
        }
        at += 1 + n_dims;
    }
    return at == n_words;
}

static size_t get_signature(control_reader_t *reader, signature_t *signature)
{
    reader_t *in = &reader->in;
    uint8_t head = get_u8(in);
    *signature = (signature_t){.op = (hvd_op_t)(head & ~(SIGNATURE_SCALED | SIGNATURE_ON_DEVICE)),
                               .prescale = 1,
                               .postscale = 1,
                               .on_device = (head & SIGNATURE_ON_DEVICE) != 0};
    signature->dtype = (hvd_dtype_t)get_u8(in);
    signature->reduce = (hvd_reduce_t)get_u8(in);
    signature->root = (int)get_count(in, CONTROL_MAX_RANKS);
    if ((head & SIGNATURE_SCALED) != 0) {
        signature->prescale = get_f64(in);
        signature->postscale = get_f64(in);
    }
    signature->n_tensors = (int)get_count(in, CONTROL_MAX_WORDS);
    size_t begin = get_words(reader, CONTROL_MAX_WORDS, -1, &signature->n_dims_words);
    if ((int)signature->op >= N_OPS || signature->op == HVD_JOIN ||
        signature->dtype >= HVD_N_DTYPES || signature->reduce >= HVD_N_REDUCES) {
        in->bad = true;
    }
    bool has_shapes = !op_is_about_sets(signature->op);
    if (!control_bad(reader) &&
        (has_shapes ? !control_words_are_shapes(words_at(reader, begin), signature->n_dims_words,
                                                signature->n_tensors)
                    : signature->n_tensors != 0)) {
        in->bad = true;
    }
    return begin;
}

// Status codes travel as their absolute value.
static hvd_status_t get_status(reader_t *in)
{
    int code = (int)get_count(in, MAX_STATUS_CODE);
    if (code == 0) {
        in->bad = true;
    }
    return (hvd_status_t)-code;
}

typedef struct places {
    size_t variants[2], sizes;
} places_t;

static void get_number(reader_t *in, field_t field, control_line_t *line)
{
    uint64_t number = get_count(in, numbers[field].max);
    uint32_t small = (uint32_t)number;
    char *at = (char *)line + numbers[field].at;
    if (numbers[field].max > UINT32_MAX) {
        memcpy(at, &number, sizeof number);
    } else {
        memcpy(at, &small, sizeof small);
    }
}

static void get_field(control_reader_t *reader, field_t field, uint8_t flags, control_line_t *line,
                      places_t *places)
{
    reader_t *in = &reader->in;
    if (field < N_NUMBERS) {
        get_number(in, field, line);
        return;
    }
    switch (field) {
    case FIELD_STATUS:
        line->status = get_status(in);
        break;
    case FIELD_NAME:
        line->name = get_text(in, CONTROL_MAX_NAME_BYTES);
        break;
    case FIELD_TEXT:
        line->text = get_text(in, CONTROL_MAX_TEXT_BYTES);
        break;
    case FIELD_SIGNATURE:
    case FIELD_TWO_SIGNATURES:
        line->n_variants = field == FIELD_SIGNATURE ? 1 : 2;
        for (int i = 0; i < line->n_variants; i++) {
            line->example_ranks[i] = (int)get_count(in, CONTROL_MAX_RANKS);
            places->variants[i] = get_signature(reader, &line->variants[i]);
        }
        break;
    case FIELD_EXAMPLE:
        line->example_ranks[0] =
            (flags & FLAG_ZEROS) != 0 ? (int)get_count(in, CONTROL_MAX_RANKS) : -1;
        break;
    case FIELD_SIZES:
        if ((flags & FLAG_SIZES) != 0) {
            places->sizes = get_words(reader, CONTROL_MAX_SIZES, 0, &line->n_sizes);
        }
        break;
    case FIELD_RANKS:
        places->sizes = get_words(reader, CONTROL_MAX_RANKS, 0, &line->n_sizes);
        break;
    case FIELD_PAYLOAD:
        if ((flags & FLAG_PAYLOAD) != 0) {
            line->payload_bytes = get_count(in, CONTROL_MAX_PAYLOAD_BYTES);
            line->payload = get_bytes(in, line->payload_bytes);
        }
        break;
    case FIELD_ITEMS:
        line->n_items = (int)get_count(in, MIN(CONTROL_MAX_RUN, reader_left(in)));
        break;
    case FIELD_ASKED:
        line->n_items = (int)get_count(in, CONTROL_MAX_ASKED);
        break;
    case FIELD_BITMAPS:
        line->payload_bytes = get_count(in, CONTROL_MAX_RANKS / 8 * CONTROL_MAX_ASKED);
        line->payload = get_bytes(in, line->payload_bytes);
        break;
    default:
        break;
    }
}

// Any line, by its row in the table. The first byte has been read.
static bool get_line(control_reader_t *reader, control_kind_t kind, uint8_t flags,
                     control_line_t *line_p)
{
    places_t places = {0};
    if (kind >= CONTROL_N_KINDS || kinds[kind].fields[0] == FIELD_END ||
        (flags & ~kinds[kind].flags) != 0) {
        reader->in.bad = true;
        return false;
    }
    line_p->zeros = kind != RECORD_RUN && (flags & FLAG_ZEROS) != 0;
    for (const uint8_t *field = kinds[kind].fields; *field != FIELD_END; field++) {
        get_field(reader, (field_t)*field, flags, line_p, &places);
    }
    if (control_bad(reader)) {
        return false;
    }
    for (int i = 0; i < line_p->n_variants; i++) {
        line_p->variants[i].dims = words_at(reader, places.variants[i]);
    }
    if ((flags & FLAG_SIZES) != 0 || kind == RECORD_SET_ADD) {
        line_p->sizes = words_at(reader, places.sizes);
    }
    return true;
}

// The two kinds that make up nearly all traffic are read without the table.
bool control_next(control_reader_t *reader, control_line_t *line_p)
{
    reader_t *in = &reader->in;
    if (in->at == in->end || control_bad(reader)) {
        return false;
    }
    reader->line_at = in->at;
    reader->words.len = 0;
    uint8_t head = *in->at++;
    uint8_t flags = head & (uint8_t)~KIND_MASK;
    memset(line_p, 0, offsetof(control_line_t, example_ranks));
    line_p->kind = (control_kind_t)(head & KIND_MASK);
    if (line_p->kind == LINE_READY && (flags & (FLAG_ZEROS | FLAG_SIZES)) == 0) {
        line_p->id = (uint32_t)get_small(in, UINT32_MAX);
        line_p->example_ranks[0] = -1;
        if (flags != 0) {
            line_p->payload_bytes = get_small(in, CONTROL_MAX_PAYLOAD_BYTES);
            line_p->payload = get_bytes(in, line_p->payload_bytes);
        }
        return !in->bad;
    }
    if (line_p->kind == RECORD_RUN && (flags & ~FLAG_ZEROS) == 0) {
        line_p->rides = flags != 0;
        line_p->batch = get_small(in, UINT64_MAX);
        line_p->set = (uint32_t)get_small(in, UINT32_MAX);
        line_p->n_items = (int)get_small(in, MIN(CONTROL_MAX_RUN, reader_left(in)));
        return !in->bad;
    }
    return get_line(reader, line_p->kind, flags, line_p);
}

bool control_next_run(control_reader_t *reader, control_run_t *run_p)
{
    reader_t *in = &reader->in;
    size_t words = 0, sizes = 0;
    reader->words.len = 0;
    memset(run_p, 0, offsetof(control_run_t, name));
    uint8_t flags = get_u8(in);
    run_p->id = (uint32_t)get_small(in, UINT32_MAX);
    run_p->named = (flags & RUN_NAMED) != 0;
    if (run_p->named) {
        run_p->name = get_text(in, CONTROL_MAX_NAME_BYTES);
        words = get_signature(reader, &run_p->signature);
    }
    if ((flags & RUN_SIZES) != 0) {
        sizes = get_words(reader, CONTROL_MAX_SIZES, 0, &run_p->n_sizes);
    }
    if ((flags & RUN_RESULT) != 0) {
        run_p->result_bytes = get_small(in, CONTROL_MAX_PAYLOAD_BYTES);
        run_p->result = get_bytes(in, run_p->result_bytes);
    }
    if ((flags & ~RUN_FLAGS) != 0) {
        in->bad = true;
    }
    if (control_bad(reader)) {
        return false;
    }
    if (run_p->named) {
        run_p->signature.dims = words_at(reader, words);
    }
    if ((flags & RUN_SIZES) != 0) {
        run_p->sizes = words_at(reader, sizes);
    }
    return true;
}

bool control_next_asked(control_reader_t *reader, control_asked_t *asked_p)
{
    asked_p->set = (uint32_t)get_count(&reader->in, UINT32_MAX);
    asked_p->name = get_text(&reader->in, CONTROL_MAX_NAME_BYTES);
    return !control_bad(reader);
}

// --- Writing ------------------------------------------------------------------------------------

static void put_text(buf_t *out, control_text_t text)
{
    put_varint(out, text.bytes);
    put_bytes(out, text.at, text.bytes);
}

static void put_words(buf_t *out, const int64_t *words, int n, int64_t least)
{
    put_varint(out, (uint64_t)n);
    for (int i = 0; i < n; i++) {
        put_varint(out, (uint64_t)(words[i] - least));
    }
}

static void put_signature(buf_t *out, const signature_t *signature)
{
    bool scaled = signature->prescale != 1 || signature->postscale != 1;
    put_u8(out, (uint8_t)(signature->op | (scaled ? SIGNATURE_SCALED : 0) |
                          (signature->on_device ? SIGNATURE_ON_DEVICE : 0)));
    put_u8(out, (uint8_t)signature->dtype);
    put_u8(out, (uint8_t)signature->reduce);
    put_varint(out, (uint64_t)signature->root);
    if (scaled) {
        put_f64(out, signature->prescale);
        put_f64(out, signature->postscale);
    }
    put_varint(out, (uint64_t)signature->n_tensors);
    put_words(out, signature->dims, signature->n_dims_words, -1);
}

static void put_blob(buf_t *out, const uint8_t *at, size_t bytes)
{
    put_varint(out, bytes);
    put_bytes(out, at != NULL ? at : (const uint8_t *)"", bytes);
}

static void put_number(buf_t *out, field_t field, const control_line_t *line)
{
    const char *at = (const char *)line + numbers[field].at;
    uint64_t number;
    uint32_t small;
    memcpy(&small, at, sizeof small);
    if (numbers[field].max > UINT32_MAX) {
        memcpy(&number, at, sizeof number);
    }
    put_varint(out, numbers[field].max > UINT32_MAX ? number : small);
}

static void put_field(buf_t *out, field_t field, const control_line_t *line)
{
    if (field < N_NUMBERS) {
        put_number(out, field, line);
        return;
    }
    switch (field) {
    case FIELD_STATUS:
        put_varint(out, (uint64_t)-(int64_t)line->status);
        break;
    case FIELD_NAME:
        put_text(out, line->name);
        break;
    case FIELD_TEXT:
        put_text(out, line->text);
        break;
    case FIELD_SIGNATURE:
    case FIELD_TWO_SIGNATURES:
        for (int i = 0; i < line->n_variants; i++) {
            put_varint(out, (uint64_t)line->example_ranks[i]);
            put_signature(out, &line->variants[i]);
        }
        break;
    case FIELD_EXAMPLE:
        if (line->zeros) {
            put_varint(out, (uint64_t)line->example_ranks[0]);
        }
        break;
    case FIELD_SIZES:
        if (line->sizes != NULL) {
            put_words(out, line->sizes, line->n_sizes, 0);
        }
        break;
    case FIELD_RANKS:
        put_words(out, line->sizes, line->n_sizes, 0);
        break;
    case FIELD_PAYLOAD:
        if (line->payload != NULL) {
            put_blob(out, line->payload, line->payload_bytes);
        }
        break;
    case FIELD_ITEMS:
    case FIELD_ASKED:
        put_varint(out, (uint64_t)line->n_items);
        break;
    case FIELD_BITMAPS:
        put_blob(out, line->payload, line->payload_bytes);
        break;
    default:
        break;
    }
}

void control_put(buf_t *out, const control_line_t *line)
{
    const shape_of_kind_t *shape = &kinds[line->kind];
    uint8_t flags = (uint8_t)((line->zeros || line->rides ? FLAG_ZEROS : 0) |
                              (line->sizes != NULL ? FLAG_SIZES : 0) |
                              (line->payload != NULL ? FLAG_PAYLOAD : 0));
    put_u8(out, (uint8_t)line->kind | (flags & shape->flags));
    for (const uint8_t *field = shape->fields; *field != FIELD_END; field++) {
        put_field(out, (field_t)*field, line);
    }
}

// Small numbers straight to memory: the caller has made room for them all at once.
static inline uint8_t *write_varint(uint8_t *at, uint64_t v)
{
    while (v >= 0x80) {
        *at++ = (uint8_t)(v | 0x80);
        v >>= 7;
    }
    *at++ = (uint8_t)v;
    return at;
}

#define MAX_HEAD_BYTES 32 // a byte and three varints

void control_put_ready(buf_t *out, uint32_t id, const void *payload, size_t payload_bytes)
{
    if (!buf_reserve(out, MAX_HEAD_BYTES + payload_bytes)) {
        return;
    }
    uint8_t *at = out->data + out->len;
    *at++ = (uint8_t)(LINE_READY | (payload != NULL ? FLAG_PAYLOAD : 0));
    at = write_varint(at, id);
    if (payload != NULL) {
        at = write_varint(at, payload_bytes);
        memcpy(at, payload, payload_bytes);
        at += payload_bytes;
    }
    out->len = (size_t)(at - out->data);
}

void control_put_batch(buf_t *out, uint64_t batch, uint32_t set, bool rides, int n_items)
{
    if (!buf_reserve(out, MAX_HEAD_BYTES)) {
        return;
    }
    uint8_t *at = out->data + out->len;
    *at++ = (uint8_t)(RECORD_RUN | (rides ? FLAG_ZEROS : 0));
    at = write_varint(at, batch);
    at = write_varint(at, set);
    at = write_varint(at, (uint64_t)n_items);
    out->len = (size_t)(at - out->data);
}

void control_put_run(buf_t *out, const control_run_t *run)
{
    if (!buf_reserve(out, MAX_HEAD_BYTES)) {
        return;
    }
    uint8_t *at = out->data + out->len;
    *at++ = (uint8_t)((run->named ? RUN_NAMED : 0) | (run->sizes != NULL ? RUN_SIZES : 0) |
                      (run->result != NULL ? RUN_RESULT : 0));
    at = write_varint(at, run->id);
    out->len = (size_t)(at - out->data);
    if (run->named) {
        put_text(out, run->name);
        put_signature(out, &run->signature);
    }
    if (run->sizes != NULL) {
        put_words(out, run->sizes, run->n_sizes, 0);
    }
    if (run->result != NULL) {
        put_blob(out, run->result, run->result_bytes);
    }
}

void control_put_asked(buf_t *out, const control_asked_t *asked)
{
    put_varint(out, asked->set);
    put_text(out, asked->name);
}
