/* Preloaded: kills this process at the Nth call that changes a file below a folder; of a write, half is made first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static long last;
static char folder[PATH_MAX];

/* Count calls from here on; kill at number `nth`, counted from 1, never for 0. */
void kill_at(long nth, const char *below) {
  strncpy(folder, below, sizeof folder - 1);
  last = nth;
  calls = 0;
}

long calls_made(void) { return calls; }

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int counts(const char *path) {
  if (!folder[0] || strncmp(path, folder, strlen(folder))) return 0;
  return ++calls == last;
}

static int counts_fd(int fd) {
  char link[64], path[PATH_MAX];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return counts(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
  if (counts_fd(fd)) REAL(write)(fd, data, size / 2), die();
  return REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  if (counts_fd(fd)) REAL(pwrite)(fd, data, size / 2, at), die();
  return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  if (counts_fd(fd)) REAL(pwrite64)(fd, data, size / 2, at), die();
  return REAL(pwrite64)(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  if (counts_fd(fd)) die();
  return REAL(writev)(fd, parts, count);
}
int fsync(int fd) {
  if (counts_fd(fd)) die();
  return REAL(fsync)(fd);
}
int fdatasync(int fd) {
  if (counts_fd(fd)) die();
  return REAL(fdatasync)(fd);
}
int ftruncate(int fd, off_t size) {
  if (counts_fd(fd)) die();
  return REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
  if (counts_fd(fd)) die();
  return REAL(ftruncate64)(fd, size);
}
int rename(const char *from, const char *to) {
  if (counts(to)) die();
  return REAL(rename)(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
  if (counts(to)) die();
  return REAL(renameat)(a, from, b, to);
}
int unlink(const char *path) {
  if (counts(path)) die();
  return REAL(unlink)(path);
}
int unlinkat(int fd, const char *path, int flags) {
  if (counts_fd(fd)) die();
  return REAL(unlinkat)(fd, path, flags);
}
int rmdir(const char *path) {
  if (counts(path)) die();
  return REAL(rmdir)(path);
}
