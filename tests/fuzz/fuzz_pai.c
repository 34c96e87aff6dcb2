// SPDX-License-Identifier: Apache-2.0
//
// fuzz_pai.c - job files of OpenPAI and answers of its server: JSON or YAML from anybody.
//
// Whatever can be read is held against the rules of both forms; every finding is one whole line.
// Whether it is JSON is asked of all.
#include "fuzz.h"
#include "pai/internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    pai_document_t *document;
    err_t err = {0};
    MUST(pai_json_check((const char *)data, bytes, "job", &err) == HVD_OK || err.text[0] != '\0');
    if (pai_document_read((const char *)data, bytes, "job", &document, &err) != HVD_OK) {
        MUST(err.status == HVD_INVALID_ARGUMENT && err.text[0] != '\0');
        return 0;
    }
    for (pai_format_t format = PAI_V1; format <= PAI_V2; format++) {
        pai_findings_t findings = {.file = "job"};
        pai_check(document, format, &findings);
        MUST((findings.n_errors + findings.n_warnings > 0) == (findings.text.len > 0));
        MUST(findings.text.len == 0 || findings.text.data[findings.text.len - 1] == '\n');
        buf_free(&findings.text);
    }
    pai_document_free(document);
    return 0;
}
