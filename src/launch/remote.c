// SPDX-License-Identifier: Apache-2.0
//
// remote.c - the command that starts an agent on another host, and what its failure means.
//
// ssh runs a line of POSIX shell there that takes this very binary if the same path exists, else
// the horovodrun of the PATH. Nothing secret is in the command: orders, environment and secret
// follow on its stdin. Whether unknown host keys are accepted is the user's ssh configuration's
// business. ssh never asks questions: nobody could answer for 64 hosts. What ssh says when it fails
// is matched against a table of causes with their fix.
#define _GNU_SOURCE
#include "launch/launch.h"

#include <stdlib.h>
#include <unistd.h>

#define KUBE_AGENT "/etc/mpi/kubexec.sh"
// The operator's script as it is, except that it passes stdin on, by which agents get their orders.
#define BY_KUBECTL                                                                                 \
    "sh -c 'exec sh -c \"$(sed \"s/kubectl exec/& -i/\" " KUBE_AGENT ")\" kubexec \"$@\"' kubexec"

static const struct {
    const char *said; // a part of what ssh prints
    remote_fault_t fault;
} faults[] = {
    {REMOTE_NOT_INSTALLED,
     {"horovodrun is not installed there",
      "install the same version on that host, in the same place or in the PATH of ssh sessions",
      FAULT_STAYS, true}},
    {"Host key verification failed",
     {"ssh does not trust the host's key",
      "ssh to it once by hand and accept the key, or use --ssh-accept-new; if the key has changed, "
      "ssh-keygen -R HOST",
      FAULT_STARTS, true}},
    {"Permission denied",
     {"ssh was denied access",
      "copy your key there (ssh-copy-id HOST), or name the right key with -i, the right user with "
      "user@host",
      FAULT_STARTS, true}},
    {"Could not resolve hostname",
     {"the name cannot be resolved here",
      "check its spelling, /etc/hosts and DNS, or use its address", FAULT_PASSES, true}},
    {"Connection refused",
     {"nothing listens on its ssh port", "start sshd there, or name its port with -p (--ssh-port)",
      FAULT_PASSES, true}},
    {"No route to host",
     {"it cannot be reached", "is it up, and does a firewall let ssh through? Try: ping HOST",
      FAULT_PASSES, true}},
    {"Network is unreachable",
     {"it cannot be reached", "check the routes and interfaces of this host: ip route",
      FAULT_PASSES, true}},
    {"timed out",
     {"it does not answer", "is it up, and does a firewall let ssh through? Try: ping HOST",
      FAULT_PASSES, true}},
    {"Connection reset",
     {"it closed the connection", "look at the log of its sshd", FAULT_PASSES, true}},
    {"Connection closed",
     {"it closed the connection", "look at the log of its sshd", FAULT_PASSES, true}},
    {"Identity file",
     {"the key file cannot be read", "check the file named with -i (--ssh-identity-file)",
      FAULT_STAYS, true}},
    {"Cannot allocate memory",
     {"out of memory", "free memory on that host, or start fewer ranks there", FAULT_STARTS, true}},
};

// What --dial-agent, or the attempt to start ssh, ends with where ssh would end with a text.
static const struct {
    int code;
    remote_fault_t fault;
} own_faults[] = {
    {EXIT_NO_LISTENER,
     {"no agent is waiting on that port",
      "start " PROGRAM " --serve-agents there, or name its port with --agent-port", FAULT_PASSES,
      true}},
    {EXIT_NO_NAME,
     {"the name cannot be resolved here",
      "check its spelling, /etc/hosts and DNS, or use its address", FAULT_PASSES, true}},
    {EXIT_NO_ANSWER,
     {"it does not answer",
      "is it up, and does a firewall let --agent-port through? Try: ping HOST", FAULT_PASSES,
      true}},
    {EXIT_UNREACHABLE,
     {"it cannot be reached", "is it up, and is there a route to it? Try: ping HOST", FAULT_PASSES,
      true}},
    {EXIT_OTHER_SECRET,
     {"it has a different secret",
      "give --serve-agents there and " PROGRAM " here the same --secret-file", FAULT_STAYS, true}},
    {EXIT_NO_SECRET,
     {"the secret cannot be read", "name the file with --secret-file, mode 0600", FAULT_STAYS,
      true}},
    {EXIT_NO_COMMAND,
     {"ssh is not installed on this machine",
      "install it (apt-get install openssh-client), or name another command with --ssh-command",
      FAULT_STAYS, true}},
};

remote_fault_t remote_explain(bool has_dialled, const char *ssh_said, int code)
{
    for (size_t i = 0; i < N_ELEMENTS(own_faults); i++) {
        if (own_faults[i].code == code && (has_dialled || code == EXIT_NO_COMMAND)) {
            return own_faults[i].fault;
        }
    }
    for (size_t i = 0; i < N_ELEMENTS(faults) && !has_dialled; i++) {
        if (strstr(ssh_said, faults[i].said) != NULL) {
            return faults[i].fault;
        }
    }
    return (remote_fault_t){"its agent did not start", "run the command by hand to see why",
                            FAULT_STARTS, false};
}

// --- The command ---------------------------------------------------------------------------------

static void add(buf_t *words, const char *word)
{
    char *copy = strdup(word);
    if (copy == NULL || buf_append(words, &copy, sizeof copy) == NULL) {
        words->failed = true;
        free(copy);
    }
}

static void add_option(buf_t *words, const char *option, const char *value)
{
    add(words, option);
    add(words, value);
}

// Runs in whatever shell the user has there; the inner one is POSIX.
static void add_script(buf_t *words, const char *own_path, const char *arguments)
{
    static const char rest[] =
        "; [ -x \"$p\" ] || p=$(command -v " PROGRAM ") || { echo " REMOTE_NOT_INSTALLED
        " >&2; exit 127; }; exec \"$p\" ";
    buf_t script = {0}, quoted = {0};
    buf_append(&script, "p=", 2);
    quote_word(own_path, &script);
    buf_append(&script, rest, sizeof rest - 1);
    buf_append(&script, arguments, strlen(arguments) + 1);
    buf_append(&quoted, "exec sh -c ", strlen("exec sh -c "));
    if (!script.failed) {
        quote_word((const char *)script.data, &quoted);
    }
    buf_append(&quoted, "", 1);
    if (script.failed || quoted.failed) {
        words->failed = true;
    } else {
        add(words, (const char *)quoted.data);
    }
    buf_free(&script);
    buf_free(&quoted);
}

static bool is_ssh(const char *program)
{
    const char *slash = strrchr(program, '/');
    return strcmp(slash != NULL ? slash + 1 : program, "ssh") == 0;
}

static void add_ssh_options(buf_t *words, const options_t *options)
{
    char port[16];
    add_option(words, "-o", "BatchMode=yes");
    add_option(words, "-o", "PasswordAuthentication=no");
    add_option(words, "-o", "ConnectTimeout=10");
    add_option(words, "-o", "ServerAliveInterval=15");
    add(words, "-T");
    if (options->ssh_accept_new) {
        add_option(words, "-o", "StrictHostKeyChecking=accept-new");
    }
    if (options->ssh_port > 0) {
        snprintf(port, sizeof port, "%d", (int)options->ssh_port);
        add_option(words, "-p", port);
    }
    if (options->ssh_identity_file[0] != '\0') {
        add_option(words, "-i", options->ssh_identity_file);
    }
}

// Ourselves instead of ssh: see relay.c.
static char **dial_command(const options_t *options, const host_t *host, const char *own_path)
{
    char port[16];
    char *end = NULL;
    buf_t words = {0};
    snprintf(port, sizeof port, "%d",
             host->agent_port > 0 ? host->agent_port : (int)options->agent_port);
    add(&words, own_path);
    add_option(&words, "--dial-agent", host->address != NULL ? host->address : host->name);
    add_option(&words, "--agent-port", port);
    add_option(&words, "--secret-file", options->secret_file);
    buf_append(&words, &end, sizeof end);
    if (words.failed) {
        buf_free(&words);
        return NULL;
    }
    return (char **)(void *)words.data;
}

char **remote_command(const options_t *options, const host_t *host, const char *own_path)
{
    char arguments[1024] = "--agent";
    if (options->agent_port > 0) {
        return dial_command(options, host, own_path);
    }
    if (host->arguments != NULL) {
        snprintf(arguments, sizeof arguments, "--agent %s", host->arguments);
    }
    return remote_program(options, host, own_path, arguments);
}

char **remote_program(const options_t *options, const host_t *host, const char *own_path,
                      const char *arguments)
{
    const char *kube = environment("OMPI_MCA_plm_rsh_agent");
    bool is_free = options->origins[OPTION_ssh_command] == BY_DEFAULT;
    bool is_kube = is_free && kube != NULL && strcmp(kube, KUBE_AGENT) == 0;
    char **command = split_words(is_kube                            ? BY_KUBECTL
                                 : is_free && host->starter != NULL ? host->starter
                                                                    : options->ssh_command);
    buf_t words = {0};
    if (command == NULL || command[0] == NULL) {
        free_words(command);
        return NULL;
    }
    for (char **at = command; *at != NULL; at++) {
        add(&words, *at);
    }
    if (is_ssh(command[0])) {
        add_ssh_options(&words, options);
    }
    free_words(command);
    add(&words, host->target);
    add_script(&words, own_path, arguments);
    char *end = NULL;
    buf_append(&words, &end, sizeof end);
    if (words.failed) {
        buf_free(&words);
        return NULL;
    }
    return (char **)(void *)words.data;
}
