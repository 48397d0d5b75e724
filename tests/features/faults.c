/* Makes the Nth call of one kind on files below FAULT_PATH fail: FAULT_CALL, FAULT_AT (from 0), FAULT_KIND (enospc, eio
   or short, which writes half). Says so on descriptor 2. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int seen = 0;

static int is_ours(const char *path) {
    const char *root = getenv("FAULT_PATH");
    return root && strncmp(path, root, strlen(root)) == 0;
}

static int is_our_file(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_ours(path);
}

/* 0: go on; 1: fail, errno is set; 2: write half. */
static int fault(const char *call, int ours) {
    const char *wanted = getenv("FAULT_CALL"), *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    if (!wanted || !at || !kind || !ours || strcmp(call, wanted)) return 0;
    if (__atomic_fetch_add(&seen, 1, __ATOMIC_SEQ_CST) != atoi(at)) return 0;
    dprintf(2, "FAULT %s %s\n", call, kind);
    if (!strcmp(kind, "short")) return 2;
    errno = !strcmp(kind, "enospc") ? ENOSPC : EIO;
    return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

ssize_t write(int fd, const void *data, size_t size) {
    int saved = errno, what = fd > 2 ? fault("write", is_our_file(fd)) : 0;
    if (what == 1) return -1;
    errno = saved;
    return REAL(ssize_t, "write", int, const void *, size_t)(fd, data, what == 2 && size > 1 ? size / 2 : size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    int what = fault("pwrite", is_our_file(fd));
    if (what == 1) return -1;
    return REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t)(
        fd, data, what == 2 && size > 1 ? size / 2 : size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    int what = fault("pwritev", is_our_file(fd));
    if (what == 1) return -1;
    return REAL(ssize_t, "pwritev64", int, const struct iovec *, int, off64_t)(
        fd, parts, what == 2 && count > 1 ? count / 2 : count, offset);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return pwritev64(fd, parts, count, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int what = fault("writev", is_our_file(fd));
    if (what == 1) return -1;
    return REAL(ssize_t, "writev", int, const struct iovec *, int)(
        fd, parts, what == 2 && count > 1 ? count / 2 : count);
}

int fsync(int fd) {
    if (fault("fsync", is_our_file(fd)) == 1) return -1;
    return REAL(int, "fsync", int)(fd);
}

int fdatasync(int fd) {
    if (fault("fdatasync", is_our_file(fd)) == 1) return -1;
    return REAL(int, "fdatasync", int)(fd);
}

int ftruncate64(int fd, off64_t size) {
    if (fault("ftruncate", is_our_file(fd)) == 1) return -1;
    return REAL(int, "ftruncate64", int, off64_t)(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int rename(const char *from, const char *to) {
    if (fault("rename", is_ours(from)) == 1) return -1;
    return REAL(int, "rename", const char *, const char *)(from, to);
}

int unlink(const char *path) {
    if (fault("unlink", is_ours(path)) == 1) return -1;
    return REAL(int, "unlink", const char *)(path);
}

int mkdir(const char *path, mode_t mode) {
    if (fault("mkdir", is_ours(path)) == 1) return -1;
    return REAL(int, "mkdir", const char *, mode_t)(path, mode);
}
