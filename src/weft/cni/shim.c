/*
 * weft-cni in C: the program that a container runtime executes. It sends the call to the weft agent and prints its
 * answer. The twin of main.py, function by function; docs/design/cni-wire.md is the contract of both.
 *
 *     cc -static -Os -s -o weft-cni shim.c
 */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define SOCKET "/run/weft/cni.sock"
#define LOG "/var/log/contivk8s.log"
#define MAGIC "WFT1"
#define SUPPORTED "\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\""
#define ABOUT "weft-cni: the CNI plugin of weft (wire WFT1). A container runtime calls it.\nCNI versions: " SUPPORTED "\n"

enum {
    DEADLINE_MS = 60000,
    VERSION_TIMEOUT_MS = 1000, /* VERSION must not hang on a stdin that is never closed */
    OUTPUT_TIMEOUT_MS = 5000,
    LOG_LIMIT = 50 * 1024 * 1024,
    MAX_STDIN = 16 * 1024 * 1024,
    MAX_BODY = 24 * 1024 * 1024,
    CHUNK = 65536,
    PIPE_CHUNK = 4096, /* a pipe that polls as writable takes this much without blocking */
    HEADER = 8,
    MAX_DETAILS = 512,
    MAX_VERSION = 32,
};

enum code { OK = 0, IO_FAILURE = 5, NOT_DECODED = 6, TRY_LATER = 11, UNAVAILABLE = 50 };

/* Bytes that grow; `data` is ours to free, which the end of the process does. */
struct bytes {
    unsigned char *data;
    size_t size;
    size_t room;
};

/* An error of the shim itself; no failure has the code OK. */
struct failure {
    enum code code;
    const char *message;
    char details[MAX_DETAILS + 1];
};

extern char **environ;

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int left_ms(int64_t until) {
    int64_t left = until - now_ms();
    return left < 0 ? 0 : (int)left;
}

/* Whether the descriptor is ready (or broken, which the next call on it reports) before the deadline. */
static int ready(int fd, short events, int64_t until) {
    struct pollfd waiting = {.fd = fd, .events = events};
    int count;
    do {
        count = poll(&waiting, 1, left_ms(until));
    } while (count < 0 && errno == EINTR);
    return count > 0;
}

/* Room for `more` bytes at the end. Without memory nothing is left to do but to fail. */
static unsigned char *reserve(struct bytes *bytes, size_t more) {
    if (bytes->size + more > bytes->room) {
        bytes->room = (bytes->size + more) * 2;
        bytes->data = realloc(bytes->data, bytes->room);
        if (!bytes->data)
            _exit(1);
    }
    return bytes->data + bytes->size;
}

static void append(struct bytes *bytes, const void *data, size_t size) {
    if (size > 0)
        memcpy(reserve(bytes, size), data, size);
    bytes->size += size;
}

static void append_number(struct bytes *bytes, uint32_t value) {
    unsigned char wire[4] = {value >> 24, value >> 16 & 0xff, value >> 8 & 0xff, value & 0xff};
    append(bytes, wire, sizeof wire);
}

__attribute__((format(printf, 2, 3))) static void append_text(struct bytes *bytes, const char *format, ...) {
    char text[2048];
    va_list values;
    va_start(values, format);
    int size = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    append(bytes, text, size < (int)sizeof text ? (size_t)size : sizeof text - 1);
}

__attribute__((format(printf, 4, 5))) static int fail(struct failure *failure, enum code code, const char *message,
                                                      const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(failure->details, sizeof failure->details, format, values);
    va_end(values);
    failure->code = code;
    failure->message = message;
    return -1;
}

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

/* All of stdin, or -1 and the failure. */
static int read_stdin(struct bytes *config, int64_t until, struct failure *failure) {
    static const char unread[] = "stdin could not be read";
    while (ready(STDIN_FILENO, POLLIN, until)) {
        ssize_t count = read(STDIN_FILENO, reserve(config, CHUNK), CHUNK);
        if (count == 0)
            return 0;
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return fail(failure, IO_FAILURE, unread, "%s", strerror(errno));
        config->size += (size_t)count;
        if (config->size > MAX_STDIN) {
            config->size = 0;
            return fail(failure, NOT_DECODED, "the network configuration is too large", "16 MiB is the limit");
        }
    }
    return fail(failure, IO_FAILURE, unread, "it did not end before the deadline");
}

/* A socket to the agent, or -1 with errno; EAGAIN when its backlog stayed full. */
static int connect_agent(const char *path, int64_t until) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    int agent = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (agent < 0)
        return -1;
    /* connect(2) waits for room in the backlog, bounded only by SO_SNDTIMEO of a blocking socket. */
    int left = left_ms(until) > 0 ? left_ms(until) : 1;
    struct timeval timeout = {.tv_sec = left / 1000, .tv_usec = left % 1000 * 1000};
    setsockopt(agent, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    if (connect(agent, (struct sockaddr *)&address, sizeof address) == 0)
        return agent;
    return -1;
}

/* All bytes sent, or -1; errno is ETIME when the deadline passed. */
static int send_all(int agent, const struct bytes *bytes, int64_t until) {
    for (size_t sent = 0; sent < bytes->size;) {
        if (!ready(agent, POLLOUT, until)) {
            errno = ETIME;
            return -1;
        }
        ssize_t count = send(agent, bytes->data + sent, bytes->size - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count > 0)
            sent += (size_t)count;
        else if (errno != EAGAIN && errno != EINTR)
            return -1;
    }
    return 0;
}

/* Exactly so many bytes received, or -1; errno is ETIME when the deadline passed. */
static int receive(int agent, struct bytes *bytes, size_t size, int64_t until) {
    bytes->size = 0;
    while (bytes->size < size) {
        if (!ready(agent, POLLIN, until)) {
            errno = ETIME;
            return -1;
        }
        ssize_t count = recv(agent, reserve(bytes, size - bytes->size), size - bytes->size, MSG_DONTWAIT);
        if (count > 0)
            bytes->size += (size_t)count;
        else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
            errno = ECONNRESET;
            return -1;
        }
    }
    return 0;
}

static uint32_t number(const unsigned char *wire) {
    return (uint32_t)wire[0] << 24 | (uint32_t)wire[1] << 16 | (uint32_t)wire[2] << 8 | wire[3];
}

static void write_call(struct bytes *frame, const struct bytes *config, int64_t until) {
    struct bytes variables = {0};
    for (char **variable = environ; *variable; variable++)
        if (strncmp(*variable, "CNI_", 4) == 0)
            append(&variables, *variable, strlen(*variable) + 1);
    append(frame, MAGIC, 4);
    append_number(frame, (uint32_t)(8 + variables.size + config->size));
    append_number(frame, (uint32_t)(left_ms(until) > 0 ? left_ms(until) : 1));
    append_number(frame, (uint32_t)variables.size);
    append(frame, variables.data, variables.size);
    append(frame, config->data, config->size);
}

/* Send one frame to the agent and receive one: the body of the answer, or -1 and the failure. */
static int exchange(const struct bytes *config, struct bytes *answer, int64_t until, int within,
                    struct failure *failure) {
    const char *path = setting("WEFT_CNI_SOCKET", SOCKET);
    int agent = connect_agent(path, until);
    if (agent < 0 && errno != EAGAIN)
        return fail(failure, TRY_LATER, "the weft agent is unreachable", "connecting to %s: %s", path, strerror(errno));
    if (agent >= 0) {
        struct bytes frame = {0};
        write_call(&frame, config, until);
        errno = 0;
        if (send_all(agent, &frame, until) == 0 && receive(agent, answer, HEADER, until) == 0 &&
            memcmp(answer->data, MAGIC, 4) == 0) {
            uint32_t size = number(answer->data + 4);
            if (size > 0 && size <= MAX_BODY && receive(agent, answer, size, until) == 0)
                return 0;
        }
        if (errno != ETIME)
            return fail(failure, TRY_LATER, "the weft agent closed the connection", "incomplete answer from %s", path);
    }
    return fail(failure, TRY_LATER, "the weft agent did not answer in time", "no answer from %s within %d ms", path,
                within);
}

/* Printable text, cut at a limit; bytes found in `unfit` become question marks too. */
static void clean(char *text, const char *dirty, size_t limit, const char *unfit) {
    size_t size = 0;
    for (; size < limit && dirty[size]; size++) {
        unsigned char byte = (unsigned char)dirty[size];
        text[size] = byte < 32 || byte > 126 || strchr(unfit, byte) ? '?' : (char)byte;
    }
    text[size] = '\0';
}

/* The value of the outermost `cniVersion`, or `otherwise`. Errors need it too, so `config` may be broken JSON. */
static void requested_version(const struct bytes *config, char version[MAX_VERSION + 1], const char *otherwise) {
    static const char fit[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.+-";
    const char *text = (const char *)config->data, *key = "", *found = "";
    size_t key_size = 0, found_size = 0;
    int depth = 0, colons = 0;
    for (size_t at = 0; at < config->size;) {
        char byte = text[at++];
        if (byte == '"') {
            size_t start = at;
            while (at < config->size && text[at] != '"')
                at += text[at] == '\\' ? 2 : 1;
            size_t size = (at < config->size ? at : config->size) - start;
            at++;
            if (depth == 1 && colons == 1 && key_size == 10 && memcmp(key, "cniVersion", 10) == 0) {
                found = text + start;
                found_size = size;
            }
            key = text + start;
            key_size = size;
            colons = 0;
        } else if (byte == ':') {
            colons++;
        } else if (!strchr(" \t\r\n", byte) || byte == '\0') {
            depth += (byte == '{' || byte == '[') - (byte == '}' || byte == ']');
            key_size = 0;
            colons = 0;
        }
    }
    snprintf(version, MAX_VERSION + 1, "%.*s", (int)found_size, found);
    if (found_size == 0 || found_size > MAX_VERSION || strlen(version) != found_size ||
        strspn(version, fit) != found_size)
        strcpy(version, otherwise);
}

/* The agent's answer, or an error of our own: an exit code, and all of stdout behind the first `*skip` bytes. */
static int call_agent(const char *command, int64_t started, struct bytes *stdout_bytes, size_t *skip) {
    const char *text = setting("WEFT_CNI_DEADLINE_MS", "");
    size_t digits = strspn(text, "0123456789");
    int within = digits > 0 && digits < 8 && !text[digits] ? atoi(text) : 0;
    if (within == 0)
        within = DEADLINE_MS;
    int64_t until = started + within;
    struct bytes config = {0};
    struct failure failure;
    if (read_stdin(&config, until, &failure) == 0 && exchange(&config, stdout_bytes, until, within, &failure) == 0) {
        *skip = 1;
        return stdout_bytes->data[0];
    }
    if (failure.code == TRY_LATER && strcmp(command, "STATUS") == 0)
        failure.code = UNAVAILABLE;
    char version[MAX_VERSION + 1], details[MAX_DETAILS + 1];
    requested_version(&config, version, "0.1.0");
    clean(details, failure.details, MAX_DETAILS, "\"\\");
    stdout_bytes->size = 0;
    append_text(stdout_bytes, "{\"cniVersion\":\"%s\",\"code\":%d,\"msg\":\"%s\",\"details\":\"%s\"}\n", version,
                failure.code, failure.message, details);
    return 1;
}

/* Print the answer; whether the runtime read all of it in time. */
static int write_stdout(const unsigned char *data, size_t size) {
    int64_t until = now_ms() + OUTPUT_TIMEOUT_MS;
    while (size > 0) {
        if (!ready(STDOUT_FILENO, POLLOUT, until))
            return 0;
        ssize_t count = write(STDOUT_FILENO, data, size < PIPE_CHUNK ? size : PIPE_CHUNK);
        if (count < 0 && errno != EINTR)
            return 0;
        if (count > 0) {
            data += count;
            size -= (size_t)count;
        }
    }
    return 1;
}

/* Open the log, rotated when it is full. Of many processes one rotates; the others keep the file they have. */
static int open_log(const char *path) {
    int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int file = open(path, flags, 0640);
    struct stat mine, named;
    if (file < 0 || fstat(file, &mine) < 0 || mine.st_size < LOG_LIMIT || lockf(file, F_TLOCK, 0) < 0)
        return file;
    if (stat(path, &named) == 0 && named.st_ino == mine.st_ino) {
        char old[4096];
        if (snprintf(old, sizeof old, "%s.old", path) >= (int)sizeof old || rename(path, old) < 0)
            return file;
    }
    int fresh = open(path, flags, 0640);
    return fresh < 0 ? file : fresh;
}

static void append_word(struct bytes *line, const char *name, const char *value) {
    char word[MAX_DETAILS + 1];
    clean(word, value, MAX_DETAILS, " ");
    append_text(line, " %s=%s", name, *word ? word : "-");
}

/* Append one line about the call. A log that cannot be written must not fail the call. */
static void write_log(const char *command, int code, const unsigned char *data, size_t size, int64_t took) {
    const char *path = getenv("WEFT_CNI_LOG");
    struct bytes line = {0};
    struct timespec now;
    struct tm utc;
    char time_text[32], answer[1025], printed[1025];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(time_text, sizeof time_text, "%Y-%m-%dT%H:%M:%S", &utc);
    append_text(&line, "%s.%03ldZ pid=%d", time_text, now.tv_nsec / 1000000, getpid());
    append_word(&line, "command", command);
    append_word(&line, "container", setting("CNI_CONTAINERID", ""));
    append_word(&line, "ifname", setting("CNI_IFNAME", ""));
    append_word(&line, "netns", setting("CNI_NETNS", ""));
    append_word(&line, "args", setting("CNI_ARGS", ""));
    while (size > 0 && strchr(" \t\r\n", data[size - 1]))
        size--;
    snprintf(printed, sizeof printed, "%.*s", (int)(size < sizeof printed ? size : sizeof printed - 1), data);
    clean(answer, printed, sizeof answer - 1, "");
    append_text(&line, " exit=%d took_ms=%lld answer=%s\n", code, (long long)took, *answer ? answer : "-");
    int file = open_log(path ? path : LOG);
    if (file >= 0 && write(file, line.data, line.size) < 0)
        return;
}

int main(void) {
    int64_t started = now_ms();
    const char *command = setting("CNI_COMMAND", "");
    struct bytes answer = {0};
    size_t skip = 0;
    int code = 0;
    signal(SIGPIPE, SIG_IGN);
    if (!*command) {
        if (write(STDERR_FILENO, ABOUT, sizeof ABOUT - 1) < 0)
            return 1;
        return 0;
    }
    if (strcmp(command, "VERSION") == 0) {
        struct bytes config = {0};
        struct failure unread;
        char version[MAX_VERSION + 1];
        read_stdin(&config, started + VERSION_TIMEOUT_MS, &unread);
        requested_version(&config, version, "1.1.0");
        append_text(&answer, "{\"cniVersion\":\"%s\",\"supportedVersions\":[" SUPPORTED "]}\n", version);
    } else {
        code = call_agent(command, started, &answer, &skip);
    }
    if (!write_stdout(answer.data + skip, answer.size - skip))
        code = 1;
    write_log(command, code, answer.data + skip, answer.size - skip, now_ms() - started);
    _exit(code);
}
