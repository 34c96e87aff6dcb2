// SPDX-License-Identifier: Apache-2.0
//
// cli.h - what horovodrun was asked for: options, hosts, which ranks go where, what each is told.
//
// Owns: the command line and the configuration file (options.h), hosts and the plan of ranks
// (plan.h), messages, exit codes. Nothing is started here. agent/ and launch/ stand on it.
#ifndef HVD_CLI_H
#define HVD_CLI_H

#include "cli/options.h"
#include "cli/plan.h"

#define PROGRAM "horovodrun"

// --- Exit codes of horovodrun itself; a failed rank's own takes precedence. docs/launcher.md -----

enum {
    EXIT_USAGE = 2,        // the command line or a file it names
    EXIT_UNREACHABLE = 69, // a host, or its agent
    EXIT_INTERNAL = 70,    // out of memory, out of descriptors
    EXIT_OUTPUT = 74,      // output cannot be written
    EXIT_START_TIMEOUT = 75,
    EXIT_NO_LISTENER = 76,  // of --dial-agent: no agent waits there
    EXIT_OTHER_SECRET = 77, // of --dial-agent: the agent has another one
    EXIT_NO_SECRET = 78,    // of --dial-agent: it cannot be read
    EXIT_NO_COMMAND = 79,   // of what should have been ssh: there is no such program here
    EXIT_NO_NAME = 80,      // of --dial-agent: nobody knows that name
    EXIT_NO_ANSWER = 81,    // of --dial-agent: nothing comes back from there
    EXIT_NOT_EXECUTABLE = 126,
    EXIT_NOT_FOUND = 127,
    EXIT_BY_SIGNAL = 128, // plus the signal's number
};

// --- Messages (message.c) ------------------------------------------------------------------------

// A sentence of the launcher itself to stderr: one line, one write. Any thread.
void say(const char *format, ...) PRINTF_LIKE(1, 2);
// What to try after a rank has written this before it failed; NULL: nothing is known.
const char *hint_for_line(const char *line);
const char *hint_for_flag(const char *flag); // what there is for one of another launcher; or NULL

// --- What a shell would do, without one (shell_words.c) ------------------------------------------

// Words of a text as a shell would take them: quotes and backslashes, nothing else. NULL: no end
// of a quote, or no memory.
char **split_words(const char *text);
// The other way: one word, quoted where a shell needs it.
void quote_word(const char *word, buf_t *out);
void free_words(char **words);
bool is_in_path(const char *program);

#endif
