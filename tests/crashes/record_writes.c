/* Recorder of the operations with which a command changes the files below one folder.

   Loaded with LD_PRELOAD. Each operation and each write to stdout is appended to a log outside the
   folder, in one order over all threads and processes. Operation number N can fail with an error, or
   kill the process group before it happens. Writes to mapped memory are not calls: the whole
   content of such a file is recorded when it is synced or unmapped.

   Environment variables:
   RECORD_WRITES_FOLDER   Absolute path of the folder without links. Empty: nothing is recorded.
   RECORD_WRITES_LOG      File of the log. It exists.
   RECORD_WRITES_CONTROL  File of 4096 zeros, which the processes share: lock and counter.
   RECORD_WRITES_STDOUT   "DEVICE:INODE" of the file that stdout is.
   RECORD_WRITES_FAIL     "NUMBER:ERRNO:MODE". MODE: 0, this operation. 1, this one and all later ones
                          that need space, and the first write is cut to half of its bytes.
                          ERRNO 0: kill the process group.
*/
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_CREATED 16
#define MAX_MAPS 1024
#define NO_FILE ((uint64_t)0)

struct control {
    uint32_t holder; /* id of the thread that holds the lock */
    uint32_t padding;
    uint64_t number; /* of the last operation */
};

struct header {
    uint32_t magic;
    uint32_t kind;
    uint64_t number;
    uint64_t inode;
    int64_t offset;
    int64_t modified_ns;
    uint64_t size;
    uint32_t error;
    uint32_t path_length;
    uint32_t target_length;
    uint32_t process;
};

struct map {
    void *address;
    size_t length;
    char path[PATH_MAX];
};

static char folder[PATH_MAX], log_path[PATH_MAX];
static size_t folder_length;
static struct control *control;
static uint64_t stdout_device, stdout_inode, fail_number;
static int fail_error, fail_mode;
static struct map maps[MAX_MAPS];
static __thread int depth;

#define REAL(type, name, ...)                                                                      \
    static type (*real)(__VA_ARGS__);                                                              \
    if (!real)                                                                                     \
        real = dlsym(RTLD_NEXT, #name);

static int real_open(const char *path, int flags) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0);
}

/* --- log --- */

/* Read the environment variables again. A forked process calls this to start a recording. */
void record_writes_start(void) {
    const char *given = getenv("RECORD_WRITES_FOLDER"), *log = getenv("RECORD_WRITES_LOG");
    const char *shared = getenv("RECORD_WRITES_CONTROL"), *out = getenv("RECORD_WRITES_STDOUT");
    const char *fail = getenv("RECORD_WRITES_FAIL");
    folder_length = 0;
    if (!given || !*given || !log || !shared)
        return;
    int descriptor = real_open(shared, O_RDWR);
    if (descriptor < 0)
        abort();
    control = (void *)syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    syscall(SYS_close, descriptor);
    if (control == MAP_FAILED)
        abort();
    stdout_device = stdout_inode = fail_number = 0;
    if (out)
        sscanf(out, "%lu:%lu", &stdout_device, &stdout_inode);
    if (fail)
        sscanf(fail, "%lu:%d:%d", &fail_number, &fail_error, &fail_mode);
    snprintf(log_path, sizeof log_path, "%s", log);
    snprintf(folder, sizeof folder, "%s", given);
    folder_length = strlen(folder);
}

__attribute__((constructor)) static void load(void) { record_writes_start(); }

static int is_recording(void) { return folder_length && !depth; }

static void lock(void) {
    uint32_t own = (uint32_t)syscall(SYS_gettid);
    depth++;
    for (unsigned tries = 1;; tries++) {
        uint32_t free_lock = 0;
        if (__atomic_compare_exchange_n(&control->holder, &free_lock, own, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return;
        /* A process that was killed may have held it. */
        if (tries % 1024 == 0 && kill((pid_t)free_lock, 0) && errno == ESRCH)
            __atomic_compare_exchange_n(&control->holder, &free_lock, 0, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
        sched_yield();
    }
}

static void unlock(void) {
    __atomic_store_n(&control->holder, 0, __ATOMIC_RELEASE);
    depth--;
}

static void write_log(const void *content, size_t size) {
    int saved = errno;
    int descriptor = real_open(log_path, O_WRONLY | O_APPEND);
    while (descriptor >= 0 && size) {
        long written = syscall(SYS_write, descriptor, content, size);
        if (written <= 0)
            abort();
        content = (const char *)content + written;
        size -= (size_t)written;
    }
    if (descriptor < 0)
        abort();
    syscall(SYS_close, descriptor);
    errno = saved;
}

struct operation {
    char kind;
    const char *path, *target;
    uint64_t inode;
    int64_t offset, modified_ns;
};

static void append(struct operation *done, const void *content, size_t size, int error) {
    struct header header = {0x56495341,
                            (uint32_t)done->kind,
                            ++control->number,
                            done->inode,
                            done->offset,
                            done->modified_ns,
                            size,
                            (uint32_t)error,
                            (uint32_t)strlen(done->path),
                            done->target ? (uint32_t)strlen(done->target) : 0,
                            (uint32_t)getpid()};
    size_t total = sizeof header + header.path_length + header.target_length + size;
    char *record = malloc(total), *end = record;
    if (!record)
        abort();
    end = mempcpy(end, &header, sizeof header);
    end = mempcpy(end, done->path, header.path_length);
    end = mempcpy(end, done->target ? done->target : "", header.target_length);
    memcpy(end, content ? content : "", size);
    write_log(record, total);
    free(record);
}

static void modified(struct operation *done, const struct stat *status) {
    done->inode = status->st_ino;
    done->modified_ns = (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

/* Rust libraries rename some files by system calls of their own. The files that this process created
   last are compared with their names before each operation. */
static struct {
    char path[PATH_MAX];
    uint64_t inode;
} created[MAX_CREATED];
static unsigned num_created;

static void note_created(const char *path, uint64_t inode) {
    unsigned place = num_created++ % MAX_CREATED;
    created[place].inode = inode;
    snprintf(created[place].path, PATH_MAX, "%s", path);
}

static void find_renames(void) {
    struct stat status;
    for (unsigned i = 0; i < MAX_CREATED; i++) {
        if (!created[i].inode || (!lstat(created[i].path, &status) && status.st_ino == created[i].inode))
            continue;
        char target[2 * PATH_MAX], parent[PATH_MAX];
        snprintf(parent, sizeof parent, "%s", created[i].path);
        *strrchr(parent, '/') = 0;
        DIR *names = opendir(parent);
        for (struct dirent *entry; names && (entry = readdir(names));)
            if (entry->d_ino == created[i].inode) {
                snprintf(target, sizeof target, "%s/%s", parent, entry->d_name);
                struct operation done = {.kind = 'N', .path = created[i].path, .target = target};
                if (!lstat(target, &status)) {
                    modified(&done, &status);
                    append(&done, NULL, 0, 0);
                }
            }
        if (names)
            closedir(names);
        created[i].inode = NO_FILE;
    }
}

/* Takes the lock. Returns 0, or -1 with errno if the operation has to fail. 1: write half of it. */
static int begin(struct operation *planned, size_t size) {
    int saved = errno;
    lock();
    find_renames();
    errno = saved;
    uint64_t number = control->number + 1;
    if (!fail_number || number < fail_number)
        return 0;
    if (!fail_error) {
        kill(0, SIGKILL);
        for (;;)
            pause();
    }
    if (fail_mode == 0 && number > fail_number)
        return 0;
    if (fail_mode == 1) {
        if (!strchr("CWAMLSX", planned->kind))
            return 0;
        if (number == fail_number && planned->kind == 'W' && size > 1)
            return 1;
    }
    append(planned, NULL, 0, fail_error);
    unlock();
    errno = fail_error;
    return -1;
}

/* --- paths --- */

static int is_inside(const char *path) {
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

/* Make an absolute path without "." and "..". Returns whether it is below the folder. */
static int resolve(int descriptor, const char *path, char *result) {
    char joined[2 * PATH_MAX], link[64], base[PATH_MAX];
    if (!path)
        return 0;
    if (*path == '/') {
        snprintf(joined, sizeof joined, "%s", path);
    } else {
        if (descriptor == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0)
            return 0;
        base[length] = 0;
        snprintf(joined, sizeof joined, "%s/%s", base, path);
    }
    char *end = result;
    *end = 0;
    for (char *state, *name = strtok_r(joined, "/", &state); name; name = strtok_r(NULL, "/", &state)) {
        if (!strcmp(name, "."))
            continue;
        if (!strcmp(name, "..")) {
            while (end > result && *--end != '/')
                ;
            *end = 0;
            continue;
        }
        size_t length = strlen(name);
        if (end - result + length + 2 > PATH_MAX)
            return 0;
        *end++ = '/';
        end = stpcpy(end, name);
    }
    return is_inside(result);
}

/* 0: not recorded. 1: a file below the folder. 2: stdout. 3: a folder. */
static int file_of(int descriptor, char *path, struct stat *status) {
    char link[64];
    if (fstat(descriptor, status))
        return 0;
    if (stdout_inode && status->st_ino == stdout_inode && status->st_dev == stdout_device) {
        strcpy(path, "stdout");
        return 2;
    }
    if (!S_ISREG(status->st_mode) && !S_ISDIR(status->st_mode))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    if (!is_inside(path))
        return 0;
    return S_ISDIR(status->st_mode) ? 3 : 1;
}

/* --- opening --- */

static void note_opened(int descriptor, struct operation *done) {
    struct stat status;
    if (!fstat(descriptor, &status))
        modified(done, &status);
    append(done, NULL, 0, 0);
    if (done->kind == 'C')
        note_created(done->path, done->inode);
}

/* The file of a name has another one now, or none. */
static void forget_created(const char *path) {
    for (unsigned i = 0; i < MAX_CREATED; i++)
        if (created[i].inode && !strcmp(created[i].path, path))
            created[i].inode = NO_FILE;
}

/* What an opening changes: 'C' creates, 'T' truncates, 0 nothing. */
static char opening(int descriptor, const char *path, int flags, char *resolved) {
    struct stat status;
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !resolve(descriptor, path, resolved))
        return 0;
    if (lstat(resolved, &status))
        return flags & O_CREAT ? 'C' : 0;
    if ((flags & O_EXCL) || !(flags & O_TRUNC) || !S_ISREG(status.st_mode))
        return 0;
    return 'T';
}

#define OPEN(name, descriptor, call, ...)                                                          \
    int name(__VA_ARGS__) {                                                                        \
        REAL(int, name, __VA_ARGS__)                                                               \
        mode_t mode = 0;                                                                           \
        char resolved[PATH_MAX];                                                                   \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                       \
            va_list arguments;                                                                     \
            va_start(arguments, flags);                                                            \
            mode = va_arg(arguments, mode_t);                                                      \
            va_end(arguments);                                                                     \
        }                                                                                          \
        struct operation done = {0};                                                               \
        if (!is_recording() || !(done.kind = opening(descriptor, path, flags, resolved)))          \
            return call;                                                                           \
        done.path = resolved;                                                                      \
        if (begin(&done, 0))                                                                       \
            return -1;                                                                             \
        int opened = call;                                                                         \
        if (opened >= 0)                                                                           \
            note_opened(opened, &done);                                                            \
        unlock();                                                                                  \
        return opened;                                                                             \
    }
OPEN(open, AT_FDCWD, real(path, flags, mode), const char *path, int flags, ...)
OPEN(open64, AT_FDCWD, real(path, flags, mode), const char *path, int flags, ...)
OPEN(openat, at, real(at, path, flags, mode), int at, const char *path, int flags, ...)
OPEN(openat64, at, real(at, path, flags, mode), int at, const char *path, int flags, ...)

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* The C library opens the file of a stream itself. */
#define FOPEN(name)                                                                                \
    FILE *name(const char *path, const char *mode) {                                               \
        REAL(FILE *, name, const char *, const char *)                                             \
        char resolved[PATH_MAX];                                                                   \
        int flags = *mode == 'w' ? O_CREAT | O_TRUNC : *mode == 'a' ? O_CREAT : 0;                 \
        struct operation done = {0};                                                               \
        if (!is_recording() || !(done.kind = opening(AT_FDCWD, path, flags, resolved)))            \
            return real(path, mode);                                                               \
        done.path = resolved;                                                                      \
        if (begin(&done, 0))                                                                       \
            return NULL;                                                                           \
        FILE *opened = real(path, mode);                                                           \
        if (opened)                                                                                \
            note_opened(fileno(opened), &done);                                                    \
        unlock();                                                                                  \
        return opened;                                                                             \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* --- writing --- */

static int64_t position(int descriptor, const struct stat *status) {
    return fcntl(descriptor, F_GETFL) & O_APPEND ? status->st_size : lseek(descriptor, 0, SEEK_CUR);
}

/* Fill in the operation of a write. Returns whether it is recorded. */
static int writing(int descriptor, off_t offset, struct operation *planned, char *path) {
    struct stat status;
    if (!is_recording())
        return 0;
    int saved = errno, kind = file_of(descriptor, path, &status);
    if (kind == 1 || kind == 2) {
        planned->kind = kind == 1 ? 'W' : 'K';
        planned->path = path;
        planned->inode = status.st_ino;
        planned->offset = offset >= 0 ? offset : position(descriptor, &status);
    }
    errno = saved;
    return kind == 1 || kind == 2;
}

static void written(int descriptor, struct operation *done, const void *content, ssize_t size) {
    struct stat status;
    int saved = errno;
    if (size > 0) {
        if (!fstat(descriptor, &status))
            modified(done, &status);
        append(done, content, (size_t)size, 0);
    }
    unlock();
    errno = saved;
}

#define WRITE(name, offset, call, ...)                                                             \
    ssize_t name(__VA_ARGS__) {                                                                    \
        REAL(ssize_t, name, __VA_ARGS__)                                                           \
        char path[PATH_MAX];                                                                       \
        struct operation done = {0};                                                               \
        if (!writing(descriptor, offset, &done, path))                                             \
            return call;                                                                           \
        int failure = begin(&done, size);                                                          \
        if (failure < 0)                                                                           \
            return -1;                                                                             \
        if (failure)                                                                               \
            size /= 2;                                                                             \
        ssize_t result = call;                                                                     \
        written(descriptor, &done, content, result);                                               \
        return result;                                                                             \
    }
WRITE(write, -1, real(descriptor, content, size), int descriptor, const void *content, size_t size)
WRITE(pwrite, at, real(descriptor, content, size, at), int descriptor, const void *content, size_t size, off_t at)
WRITE(pwrite64, at, real(descriptor, content, size, at), int descriptor, const void *content, size_t size, off_t at)

/* One write of the joined parts. */
static char *join(const struct iovec *parts, int count, size_t *size) {
    *size = 0;
    for (int i = 0; i < count; i++)
        *size += parts[i].iov_len;
    char *joined = malloc(*size + 1), *end = joined;
    if (!joined)
        abort();
    for (int i = 0; i < count; i++)
        end = mempcpy(end, parts[i].iov_base, parts[i].iov_len);
    return joined;
}

#define WRITEV(name, call, joined_call, ...)                                                       \
    ssize_t name(__VA_ARGS__) {                                                                    \
        REAL(ssize_t, name, __VA_ARGS__)                                                           \
        char path[PATH_MAX];                                                                       \
        struct operation done = {0};                                                               \
        if (!writing(descriptor, -1, &done, path))                                                 \
            return call;                                                                           \
        size_t size;                                                                               \
        char *content = join(parts, count, &size);                                                 \
        ssize_t result = joined_call;                                                              \
        free(content);                                                                             \
        return result;                                                                             \
    }
WRITEV(writev, real(descriptor, parts, count), write(descriptor, content, size), int descriptor, const struct iovec *parts, int count)
WRITEV(pwritev, real(descriptor, parts, count, at), pwrite(descriptor, content, size, at), int descriptor, const struct iovec *parts, int count, off_t at)
WRITEV(pwritev64, real(descriptor, parts, count, at), pwrite(descriptor, content, size, at), int descriptor, const struct iovec *parts, int count, off_t at)

/* Streams, such as the one of numpy's tofile: each call is one write, without a buffer. */
size_t fwrite(const void *content, size_t size, size_t count, FILE *stream) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *)
    char path[PATH_MAX];
    struct operation done = {0};
    if (!is_recording() || fflush(stream) || !writing(fileno(stream), -1, &done, path))
        return real(content, size, count, stream);
    int failure = begin(&done, size * count);
    if (failure < 0)
        return 0;
    size_t result = real(content, size, failure ? count / 2 : count, stream);
    if (fflush(stream))
        result = 0;
    written(fileno(stream), &done, content, (ssize_t)(result * size));
    return result;
}

/* Read bytes of a file that may be open for writing only. */
static char *read_back(int descriptor, int64_t offset, size_t size) {
    char link[64], *content = malloc(size + 1);
    size_t done = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int reading = real_open(link, O_RDONLY);
    while (reading >= 0 && content && done < size) {
        ssize_t found = pread(reading, content + done, size - done, offset + (int64_t)done);
        if (found <= 0)
            break;
        done += (size_t)found;
    }
    if (!content || done < size)
        abort();
    syscall(SYS_close, reading);
    return content;
}

#define COPY(name, descriptor, start, call, ...)                                                   \
    ssize_t name(__VA_ARGS__) {                                                                    \
        REAL(ssize_t, name, __VA_ARGS__)                                                           \
        char path[PATH_MAX];                                                                       \
        struct operation done = {0};                                                               \
        if (!writing(descriptor, start, &done, path))                                             \
            return call;                                                                           \
        int failure = begin(&done, size);                                                          \
        if (failure < 0)                                                                           \
            return -1;                                                                             \
        if (failure)                                                                               \
            size /= 2;                                                                             \
        ssize_t result = call;                                                                     \
        char *content = result > 0 ? read_back(descriptor, done.offset, (size_t)result) : NULL;    \
        written(descriptor, &done, content, result);                                               \
        free(content);                                                                             \
        return result;                                                                             \
    }
COPY(sendfile, out, -1, real(out, in, offset, size), int out, int in, off_t *offset, size_t size)
COPY(sendfile64, out, -1, real(out, in, offset, size), int out, int in, off_t *offset, size_t size)
COPY(copy_file_range, out, out_offset ? *out_offset : -1, real(in, in_offset, out, out_offset, size, flags), int in,
     off_t *in_offset, int out, off_t *out_offset, size_t size, unsigned flags)

/* --- sizes --- */

#define RESIZE(name, operation_kind, end, call, failed, ...)                                       \
    int name(__VA_ARGS__) {                                                                        \
        REAL(int, name, __VA_ARGS__)                                                               \
        char path[PATH_MAX];                                                                       \
        struct operation done = {0};                                                               \
        if (!writing(descriptor, 0, &done, path) || done.kind != 'W')                              \
            return call;                                                                           \
        done.kind = operation_kind;                                                                \
        done.offset = end;                                                                         \
        if (begin(&done, 0))                                                                       \
            return failed;                                                                         \
        int result = call;                                                                         \
        struct stat status;                                                                        \
        if (!result) {                                                                             \
            if (!fstat(descriptor, &status))                                                       \
                modified(&done, &status);                                                          \
            append(&done, NULL, 0, 0);                                                             \
        }                                                                                          \
        unlock();                                                                                  \
        return result;                                                                             \
    }
RESIZE(ftruncate, 'T', length, real(descriptor, length), -1, int descriptor, off_t length)
RESIZE(ftruncate64, 'T', length, real(descriptor, length), -1, int descriptor, off_t length)
RESIZE(posix_fallocate, 'A', at + length, real(descriptor, at, length), errno, int descriptor, off_t at, off_t length)
RESIZE(posix_fallocate64, 'A', at + length, real(descriptor, at, length), errno, int descriptor, off_t at, off_t length)
RESIZE(fallocate, 'A', at + length, real(descriptor, mode, at, length), -1, int descriptor, int mode, off_t at, off_t length)
RESIZE(fallocate64, 'A', at + length, real(descriptor, mode, at, length), -1, int descriptor, int mode, off_t at, off_t length)

int truncate(const char *path, off_t length) {
    int descriptor = open(path, O_WRONLY);
    if (descriptor < 0)
        return -1;
    int result = ftruncate(descriptor, length), saved = errno;
    close(descriptor);
    errno = saved;
    return result;
}
int truncate64(const char *path, off_t length) { return truncate(path, length); }

/* --- names --- */

/* One operation on one or two names, which happens only if the first name exists, or does not. */
static int named(char kind, int exists, int from, const char *path, int to, const char *target,
                 int (*call)(int, const char *, int, const char *, int), int flags) {
    char resolved[PATH_MAX], resolved_target[PATH_MAX];
    struct stat status;
    struct operation done = {.kind = kind, .path = resolved};
    int saved = errno, inside = is_recording() && resolve(from, path, resolved);
    if (target) {
        if (is_recording() && kind != 'S')
            inside |= resolve(to, target, resolved_target);
        else
            snprintf(resolved_target, sizeof resolved_target, "%s", target);
        done.target = resolved_target;
    }
    if (inside && (lstat(resolved, &status) == 0) != exists)
        inside = 0;
    errno = saved;
    if (!inside)
        return call(from, path, to, target, flags);
    if (exists)
        done.inode = status.st_ino;
    if (begin(&done, 0))
        return -1;
    int result = call(from, path, to, target, flags);
    if (!result) {
        char *content = NULL;
        saved = errno;
        if (!lstat(kind == 'R' || kind == 'L' ? resolved_target : resolved, &status))
            modified(&done, &status);
        /* A file from outside the folder comes with its content. */
        int descriptor = -1;
        if (strchr("RL", kind) && !is_inside(resolved) && S_ISREG(status.st_mode))
            descriptor = real_open(resolved_target, O_RDONLY);
        if (descriptor >= 0) {
            content = read_back(descriptor, 0, (size_t)status.st_size);
            syscall(SYS_close, descriptor);
        }
        append(&done, content, content ? (size_t)status.st_size : 0, 0);
        free(content);
        if (kind == 'R' || kind == 'U')
            forget_created(resolved);
        errno = saved;
    }
    unlock();
    return result;
}

static int call_rename(int from, const char *path, int to, const char *target, int flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned)
    return real(from, path, to, target, (unsigned)flags);
}
static int call_link(int from, const char *path, int to, const char *target, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int)
    return real(from, path, to, target, flags);
}
static int call_symlink(int from, const char *path, int to, const char *target, int flags) {
    REAL(int, symlinkat, const char *, int, const char *)
    (void)to, (void)flags;
    return real(target, from, path);
}
static int call_unlink(int from, const char *path, int to, const char *target, int flags) {
    REAL(int, unlinkat, int, const char *, int)
    (void)to, (void)target;
    return real(from, path, flags);
}
static int call_mkdir(int from, const char *path, int to, const char *target, int flags) {
    REAL(int, mkdirat, int, const char *, mode_t)
    (void)to, (void)target;
    return real(from, path, (mode_t)flags);
}

int renameat2(int from, const char *path, int to, const char *target, unsigned flags) {
    return named('R', 1, from, path, to, target, call_rename, (int)flags);
}
int renameat(int from, const char *path, int to, const char *target) { return renameat2(from, path, to, target, 0); }
int rename(const char *path, const char *target) { return renameat(AT_FDCWD, path, AT_FDCWD, target); }
int linkat(int from, const char *path, int to, const char *target, int flags) {
    return named('L', 1, from, path, to, target, call_link, flags);
}
int link(const char *path, const char *target) { return linkat(AT_FDCWD, path, AT_FDCWD, target, 0); }
int symlinkat(const char *target, int from, const char *path) {
    return named('S', 0, from, path, 0, target, call_symlink, 0);
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
int unlinkat(int from, const char *path, int flags) {
    return named(flags & AT_REMOVEDIR ? 'D' : 'U', 1, from, path, 0, NULL, call_unlink, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) { return unlink(path) && errno == EISDIR ? rmdir(path) : 0; }
int mkdirat(int from, const char *path, mode_t mode) {
    return named('M', 0, from, path, 0, NULL, call_mkdir, (int)mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* --- mapped memory and syncing --- */

static void record_content(const char *path) {
    struct stat status;
    struct operation done = {.kind = 'X', .path = path};
    int descriptor = real_open(path, O_RDONLY);
    if (descriptor < 0)
        return;
    if (!fstat(descriptor, &status)) {
        char *content = read_back(descriptor, 0, (size_t)status.st_size);
        modified(&done, &status);
        append(&done, content, (size_t)status.st_size, 0);
        free(content);
    }
    syscall(SYS_close, descriptor);
}

#define MMAP(name)                                                                                 \
    void *name(void *address, size_t length, int protection, int flags, int descriptor, off_t at) { \
        REAL(void *, name, void *, size_t, int, int, int, off_t)                                   \
        void *result = real(address, length, protection, flags, descriptor, at);                   \
        struct stat status;                                                                        \
        char path[PATH_MAX];                                                                       \
        if (result != MAP_FAILED && descriptor >= 0 && (flags & MAP_SHARED) &&                     \
            (protection & PROT_WRITE) && is_recording()) {                                         \
            int saved = errno;                                                                     \
            lock();                                                                                \
            for (int i = 0; file_of(descriptor, path, &status) == 1 && i < MAX_MAPS; i++)          \
                if (!maps[i].address) {                                                            \
                    maps[i].address = result;                                                      \
                    maps[i].length = length;                                                       \
                    strcpy(maps[i].path, path);                                                    \
                    break;                                                                         \
                }                                                                                  \
            unlock();                                                                              \
            errno = saved;                                                                         \
        }                                                                                          \
        return result;                                                                             \
    }
MMAP(mmap)
MMAP(mmap64)

static int is_mapped(const char *path) {
    for (int i = 0; i < MAX_MAPS; i++)
        if (maps[i].address && !strcmp(maps[i].path, path))
            return 1;
    return 0;
}

int munmap(void *address, size_t length) {
    REAL(int, munmap, void *, size_t)
    if (is_recording())
        for (int i = 0; i < MAX_MAPS; i++)
            if (maps[i].address == address) {
                int saved = errno;
                lock();
                record_content(maps[i].path);
                maps[i].address = NULL;
                unlock();
                errno = saved;
                break;
            }
    return real(address, length);
}

/* Record the content of files that are still mapped. Called at the end of a process. */
void record_writes_end(void) {
    if (!is_recording())
        return;
    lock();
    for (int i = 0; i < MAX_MAPS; i++)
        if (maps[i].address) {
            record_content(maps[i].path);
            maps[i].address = NULL;
        }
    unlock();
}

__attribute__((destructor)) static void end(void) { record_writes_end(); }

void _exit(int status) {
    record_writes_end();
    syscall(SYS_exit_group, status);
    __builtin_unreachable();
}

static int synced(struct operation *done) {
    if (begin(done, 0))
        return -1;
    if (done->kind == 'F' && is_mapped(done->path))
        record_content(done->path);
    /* The recorded order is what counts. Flushing the disk itself would only take time. */
    append(done, NULL, 0, 0);
    unlock();
    return 0;
}

#define SYNC(name)                                                                                 \
    int name(int descriptor) {                                                                     \
        REAL(int, name, int)                                                                       \
        char path[PATH_MAX];                                                                       \
        struct stat status;                                                                        \
        if (!is_recording())                                                                       \
            return real(descriptor);                                                               \
        int kind = file_of(descriptor, path, &status);                                             \
        if (kind != 1 && kind != 3)                                                                \
            return real(descriptor);                                                               \
        struct operation done = {.kind = kind == 1 ? 'F' : 'G', .path = path, .inode = status.st_ino}; \
        return synced(&done);                                                                      \
    }
SYNC(fsync)
SYNC(fdatasync)

int msync(void *address, size_t length, int flags) {
    REAL(int, msync, void *, size_t, int)
    char *start = address;
    if (is_recording())
        for (int i = 0; i < MAX_MAPS; i++) {
            char *mapped = maps[i].address;
            struct stat status;
            if (mapped && start < mapped + maps[i].length && start + length > mapped && !stat(maps[i].path, &status)) {
                struct operation done = {.kind = 'F', .path = maps[i].path, .inode = status.st_ino};
                if (synced(&done))
                    return -1;
            }
        }
    return real(address, length, flags);
}
