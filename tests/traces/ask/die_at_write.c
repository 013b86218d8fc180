/* Preloaded into a process: at its nth change to answers.sqlite or its journal, from 0, it writes a share of the bytes
   and dies by SIGKILL. DIE_AT="n share". A change is a write, or that a file gets shorter or goes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long left = -1;
static double share = 0;

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int is_due(const char *name) {
    static int is_read = 0;
    if (!is_read) {
        const char *told = getenv("DIE_AT");
        is_read = 1;
        if (told != NULL) sscanf(told, "%ld %lf", &left, &share);
    }
    return left >= 0 && strstr(name, "answers.sqlite") != NULL && left-- == 0;
}

static int is_due_at(int file) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0) return 0;
    name[length] = 0;
    return is_due(name);
}

#define REAL(returns, name, ...) ((returns (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *bytes, size_t size) {
    if (is_due_at(file)) {
        REAL(ssize_t, write, int, const void *, size_t)(file, bytes, (size_t)(share * (double)size));
        die();
    }
    return REAL(ssize_t, write, int, const void *, size_t)(file, bytes, size);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    if (is_due_at(file)) {
        REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(file, bytes, (size_t)(share * (double)size), at);
        die();
    }
    return REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(file, bytes, size, at);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) { return pwrite64(file, bytes, size, at); }

int ftruncate64(int file, off64_t size) {
    if (is_due_at(file)) die();
    return REAL(int, ftruncate64, int, off64_t)(file, size);
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int unlink(const char *name) {
    if (is_due(name)) die();
    return REAL(int, unlink, const char *)(name);
}
