// SPDX-License-Identifier: Apache-2.0
//
// host.c - which machine, and which part of it, this process runs on.
//
// Two processes can share memory when the same kernel runs both and they see the same /dev/shm.
// Containers on one machine each have their own, or at least a host name of their own, and so count
// as hosts of their own; HOROVOD_HOSTNAME, where a launcher sets it, takes the place of that name.
// Without a /dev/shm the mount namespace stands in for it. Reads /proc only; any thread.
#define _GNU_SOURCE
#include "boot/boot.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

// One line of a small file, without its end.
static bool read_line(const char *path, char *text, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t n = read(fd, text, bytes - 1);
    close(fd);
    if (n <= 0) {
        return false;
    }
    text[n] = '\0';
    text[strcspn(text, "\n")] = '\0';
    return text[0] != '\0';
}

const char *boot_host_name(const char *identity)
{
    const char *slash = strrchr(identity, '/');
    return slash != NULL ? slash + 1 : identity;
}

size_t boot_kernel_bytes(const char *identity)
{
    return strcspn(identity, "/");
}

void boot_host_identity(const config_t *config, char text[256])
{
    static const char *const memory_paths[] = {"/dev/shm/.", "/proc/self/ns/mnt", "/"};
    char kernel[65];
    struct stat seen = {0};
    if (!read_line("/proc/sys/kernel/random/boot_id", kernel, sizeof kernel) &&
        gethostname(kernel, sizeof kernel) != 0) {
        snprintf(kernel, sizeof kernel, "unknown");
    }
    kernel[sizeof kernel - 1] = '\0';
    for (size_t i = 0; i < N_ELEMENTS(memory_paths) && stat(memory_paths[i], &seen) != 0; i++) {
    }
    char node[65] = "";
    bool named = config->hostname != NULL && config->hostname[0] != '\0';
    if (!named && gethostname(node, sizeof node - 1) != 0) {
        node[0] = '\0';
    }
    snprintf(text, 256, "%s/%llx.%llx/%s", kernel, (unsigned long long)seen.st_dev,
             (unsigned long long)seen.st_ino, named ? config->hostname : node);
}
