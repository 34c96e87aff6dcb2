// SPDX-License-Identifier: Apache-2.0
//
// examine.c - what horovodrun --doctor looks at on a host: network, memory, limits, clock, Python.
//
// Runs in the agent of that host; every check reports a finding, with what to do about a fault.
// Python is the one that ranks would get, with their environment and directory, and imports what
// they would import. One thread.
#define _GNU_SOURCE
#include "agent/agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define CONNECT_TIMEOUT_MS 3000
#define PYTHON_TIMEOUT_MS 120000 // a first import from a network file system takes its time
#define LEAST_SHM (64 * MIB)
#define LEAST_FILES 1024
#define MOST_SECONDS_APART 5

typedef struct exam {
    const frame_t *asked; // FRAME_EXAMINE
    finding_fn report;
    void *arg;
} exam_t;

static void report(const exam_t *exam, bool is_fault, const char *what, const char *found,
                   const char *fix)
{
    exam->report(exam->arg, &(finding_t){.is_fault = is_fault,
                                         .what = what,
                                         .found = found,
                                         .fix = is_fault ? fix : "",
                                         .version = ""});
}

static bool can_connect(const char *address, int port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *found;
    struct pollfd polled = {.events = POLLOUT};
    char service[16];
    int code = 1;
    socklen_t bytes = sizeof code;
    snprintf(service, sizeof service, "%d", port);
    if (getaddrinfo(address, service, &hints, &found) != 0) {
        return false;
    }
    polled.fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (polled.fd >= 0 && (connect(polled.fd, found->ai_addr, found->ai_addrlen) == 0 ||
                           (errno == EINPROGRESS && poll(&polled, 1, CONNECT_TIMEOUT_MS) == 1))) {
        getsockopt(polled.fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
    }
    if (polled.fd >= 0) {
        close(polled.fd);
    }
    freeaddrinfo(found);
    return code == 0;
}

static void examine_addresses(const exam_t *exam)
{
    char text[1024] = "", address[INET6_ADDRSTRLEN + 32];
    size_t len = 0;
    int n_reached = 0;
    for (const char *at = exam->asked->examine.addresses; *at != '\0' && len < sizeof text;) {
        size_t bytes = strcspn(at, ",");
        snprintf(address, sizeof address, "%.*s", (int)bytes, at);
        bool is_reached = can_connect(address, exam->asked->examine.port);
        n_reached += is_reached;
        len += (size_t)snprintf(text + len, sizeof text - len, "%s%s %s", len > 0 ? ", " : "",
                                address, is_reached ? "yes" : "no");
        at += bytes + (at[bytes] == ',');
    }
    report(exam, n_reached == 0, "reaches the launcher at", text,
           "allow TCP between the hosts on all ports, or name an interface that both can reach "
           "with --network-interfaces");
}

static void examine_memory(const exam_t *exam)
{
    struct statvfs disk;
    char text[128];
    if (statvfs("/dev/shm", &disk) != 0) {
        report(exam, true, "shared memory", "/dev/shm does not exist",
               "mount it: mount -t tmpfs tmpfs /dev/shm");
        return;
    }
    uint64_t free_bytes = (uint64_t)disk.f_bavail * disk.f_frsize;
    snprintf(text, sizeof text, "%llu MiB free in /dev/shm",
             (unsigned long long)(free_bytes / MIB));
    report(exam, free_bytes < LEAST_SHM, "shared memory", text,
           "enlarge it: mount -o remount,size=1G /dev/shm; in a container: --shm-size=1g, or an "
           "emptyDir of medium Memory");
}

static void examine_limits(const exam_t *exam)
{
    struct rlimit files = {0}, locked = {0};
    char text[128];
    getrlimit(RLIMIT_NOFILE, &files);
    snprintf(text, sizeof text, "%llu", (unsigned long long)files.rlim_cur);
    report(exam, files.rlim_cur < LEAST_FILES, "open files", text,
           "raise the limit: ulimit -n 65536, or nofile in /etc/security/limits.conf");
    getrlimit(RLIMIT_MEMLOCK, &locked);
    if (locked.rlim_cur == RLIM_INFINITY) {
        snprintf(text, sizeof text, "unlimited");
    } else {
        snprintf(text, sizeof text, "%llu KiB (RDMA needs it unlimited)",
                 (unsigned long long)(locked.rlim_cur / KIB));
    }
    report(exam, false, "locked memory", text, "");
}

static void examine_clock(const exam_t *exam)
{
    int64_t apart_s = (int64_t)time(NULL) - exam->asked->examine.time_s;
    char text[64];
    snprintf(text, sizeof text, "%+lld s relative to the launcher", (long long)apart_s);
    report(exam, llabs(apart_s) > MOST_SECONDS_APART, "clock", text,
           "synchronise the clocks with NTP; until then, times in logs and timelines do not match");
}

// Prints a line for each package: its name, version ("-": none, "!": broken) and what was found;
// before them one for the script or, behind -m, the module, if there is one. A folder or an archive
// is left to Python.
static const char python_check[] =
    "import importlib, importlib.metadata, importlib.util, os, sys, tokenize\n"
    "def report(name, version, found):\n"
    "    words = ' '.join(str(found).split())\n"
    "    print('hvd', name, version, words, sep='\\t', flush=True)\n"
    "def look_for(script):\n"
    "    place = os.getcwd()\n"
    "    if not os.path.exists(script):\n"
    "        report('script', '-', 'no file %s in %s' % (script, place))\n"
    "        return\n"
    "    try:\n"
    "        if not os.path.isdir(script) and open(script, 'rb').read(2) != b'PK':\n"
    "            compile(tokenize.open(script).read(), script, 'exec', dont_inherit=True)\n"
    "        report('script', '+', '%s in %s' % (script, place))\n"
    "    except OSError as error:\n"
    "        report('script', '-', '%s in %s: %s' % (script, place, error.strerror))\n"
    "    except (SyntaxError, ValueError) as error:\n"
    "        report('script', '!', '%s in %s is no Python script: %s' % (script, place, error))\n"
    "def look_for_module(name):\n"
    "    try:\n"
    "        is_there = importlib.util.find_spec(name) is not None\n"
    "    except Exception:\n"
    "        is_there = False\n"
    "    found = '' if is_there else 'no module '\n"
    "    report('script', '+' if is_there else '-', '%s%s for python -m in %s' %\n"
    "           (found, name, os.getcwd()))\n"
    "if sys.argv[1] == '-m':\n"
    "    look_for_module(sys.argv[2])\n"
    "elif sys.argv[2]:\n"
    "    look_for(sys.argv[2])\n"
    "report('Python', '%d.%d' % sys.version_info[:2], sys.version.split()[0] + ' at ' +\n"
    "       sys.executable)\n"
    "for name, binding, extra in (('horovod', '', ''), ('torch', 'horovod.torch', ''),\n"
    "                             ('tensorflow', 'horovod.tensorflow', 'keras')):\n"
    "    if importlib.util.find_spec(name) is None:\n"
    "        report(name, '-', 'not installed')\n"
    "        continue\n"
    "    try:\n"
    "        version = importlib.import_module(name).__version__\n"
    "        if binding and importlib.util.find_spec('horovod') is not None:\n"
    "            importlib.import_module(binding)\n"
    "        if extra:\n"
    "            version += ', %s %s' % (extra, importlib.metadata.version(extra))\n"
    "        report(name, version, version)\n"
    "    except BaseException as error:\n"
    "        report(name, '!', '%s: %s' % (type(error).__name__, error))\n";

const char *const examined_packages[] = {"Python", "horovod", "torch", "tensorflow", NULL};

#define N_PACKAGES (N_ELEMENTS(examined_packages) - 1)

#define ACTIVATE                                                                                   \
    "activate the environment that has it in the shell of " PROGRAM ": all hosts use its PATH"

static void report_package(const exam_t *exam, const char *name, const char *version,
                           const char *found)
{
    bool is_broken = strcmp(version, "!") == 0, is_horovod = strcmp(name, "horovod") == 0;
    bool is_missing = is_horovod && strcmp(version, "-") == 0 && exam->asked->examine.needs_horovod;
    bool is_other =
        is_horovod && !is_broken && version[0] != '-' && strcmp(version, hvd_version()) != 0;
    char text[1024];
    snprintf(text, sizeof text, "%s%.900s%s%s", is_broken ? "cannot be imported: " : "", found,
             is_other ? ", but " PROGRAM " is of version " : "", is_other ? hvd_version() : "");
    const finding_t finding = {
        .is_fault = is_broken || is_missing || is_other,
        .what = name,
        .found = text,
        .fix = is_missing ? "install it for this Python, or " ACTIVATE
               : is_other ? "use the " PROGRAM " and the package of one installation"
                          : "import it by hand with this Python, and repair its installation",
        .version = is_broken ? "" : version};
    exam->report(exam->arg, &finding);
}

static void report_script(const exam_t *exam, const char *verdict, const char *found)
{
    report(exam, verdict[0] != '+', "script", found,
           verdict[0] == '!' ? "correct it, or name the file that is to be run"
                             : "start " PROGRAM
                               " in the folder that has it, give the whole path, or copy it to "
                               "that host");
}

// The lines of the check; how many packages it got to.
static size_t report_packages(const exam_t *exam, char *text)
{
    size_t n = 0;
    for (char *line = text, *next; *line != '\0' && n < N_PACKAGES; line = next) {
        char *fields[4] = {line};
        size_t n_fields = 1, bytes = strcspn(line, "\n");
        next = line + bytes + (line[bytes] == '\n');
        line[bytes] = '\0';
        for (char *tab = line; n_fields < 4 && (tab = strchr(tab, '\t')) != NULL;) {
            *tab++ = '\0';
            fields[n_fields++] = tab;
        }
        bool is_ours = n_fields == 4 && strcmp(fields[0], "hvd") == 0; // packages print, too
        if (is_ours && strcmp(fields[1], "script") == 0) {
            report_script(exam, fields[2], fields[3]);
        } else if (is_ours) {
            report_package(exam, fields[1], fields[2], fields[3]);
            n++;
        }
    }
    return n;
}

// false: there is no such program.
static bool try_python(const exam_t *exam, const char *name)
{
    char *argv[] = {(char *)name,
                    "-c",
                    (char *)python_check,
                    exam->asked->examine.is_module ? "-m" : "",
                    (char *)exam->asked->examine.script,
                    NULL};
    char text[8192], found[128];
    bytes_t changes = exam->asked->examine.env;
    char **env = environ_merge(environ, changes.data, changes.len);
    misfortune_t misfortune = {0};
    int code = env == NULL ? -1
                           : run_program_in(argv, env, exam->asked->examine.directory,
                                            PYTHON_TIMEOUT_MS, text, sizeof text, &misfortune);
    free(env);
    if (misfortune.code != 0) {
        return false;
    }
    size_t n = report_packages(exam, text);
    if (code != 0 && n < N_PACKAGES) {
        snprintf(found, sizeof found, "%s crashed, or took more than %d s",
                 n == 0 ? "starting it" : "its import", PYTHON_TIMEOUT_MS / 1000);
        report(exam, true, examined_packages[n], found, "try it by hand on that host: python -v");
    }
    return true;
}

static void examine_python(const exam_t *exam)
{
    const char *wanted = exam->asked->examine.python;
    char text[256];
    if (wanted[0] != '\0' ? try_python(exam, wanted)
                          : try_python(exam, "python") || try_python(exam, "python3")) {
        return;
    }
    snprintf(text, sizeof text, "%.200s%s", wanted[0] != '\0' ? wanted : "python and python3",
             wanted[0] != '\0' ? " cannot be started there" : " are not in PATH");
    report(exam, exam->asked->examine.needs_horovod, "Python", text,
           "install it there, or " ACTIVATE);
}

static void examine_name(const exam_t *exam)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    char name[256] = "", address[NI_MAXHOST] = "the resolver does not know it", text[600];
    gethostname(name, sizeof name - 1);
    if (getaddrinfo(name, NULL, &hints, &found) == 0) {
        getnameinfo(found->ai_addr, found->ai_addrlen, address, sizeof address, NULL, 0,
                    NI_NUMERICHOST);
        freeaddrinfo(found);
    }
    snprintf(text, sizeof text, "%s (%s); ranks do not use it", name, address);
    report(exam, false, "hostname", text, "");
}

void examine_host(const frame_t *asked, finding_fn report_to, void *arg)
{
    const exam_t exam = {.asked = asked, .report = report_to, .arg = arg};
    char text[64];
    snprintf(text, sizeof text, "%ld", sysconf(_SC_NPROCESSORS_ONLN));
    report(&exam, false, "cores", text, "");
    examine_name(&exam);
    examine_addresses(&exam);
    examine_memory(&exam);
    examine_limits(&exam);
    examine_clock(&exam);
    examine_python(&exam);
}
