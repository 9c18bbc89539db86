/* Move the bytes of synchronous steps over loopback TCP, and do nothing with them, or no more than a server must.
 *
 * It answers one question: how fast could a parameter server be if its work were free? Same processes, sockets,
 * bytes and barrier as the real thing: in every step each worker sends one framed payload, the server waits for
 * all of them, then every connection sends one framed payload back. One thread per connection, buffers allocated
 * and touched beforehand.
 *
 *   wire server --port-file FILE --workers W --steps S --payload BYTES [--adam 0|1] [socket options]
 *   wire worker --port PORT --rank R --steps S --payload BYTES [--adam 0|1] [socket options]
 *
 * With --adam 1 the payload is float32: workers send gradients, and between receiving all and sending the server
 * applies Adam to their mean (wire_adam.h). --values-file FILE lets a worker write the last values as they came.
 *
 * Socket options: --block BYTES (one send or recv), --congestion NAME ("" = the kernel's choice),
 * --send-buffer BYTES, --receive-buffer BYTES (0 = the kernel tunes them), --huge 0|1 (ask for 2 MB pages, as
 * NumPy does for large arrays).
 *
 * The worker of rank 0 prints one line of JSON: the CLOCK_MONOTONIC time in ns at which each step returned.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "wire_adam.h"

enum { PREFIX_BYTES = 20, HEADER_BYTES = 108, FRAME_BYTES = PREFIX_BYTES + HEADER_BYTES, RANK_AT = 4 };

static struct {
    const char *port_file, *values_file, *congestion;
    int port, rank, workers, steps, send_buffer, receive_buffer, huge, adam;
    size_t payload, block;
} options = {.congestion = "reno", .block = 4 << 20, .huge = 1};

static pthread_barrier_t all_received, all_updated;
static struct adam state; /* values[0] is all that there is of it without --adam, and never written */
static int updaters;      /* threads that share an update */
static char **gradients;  /* by rank */

static void die(const char *what) {
    fprintf(stderr, "wire: %s: %s\n", what, strerror(errno));
    exit(1);
}

static char *touched_buffer(size_t size, int byte) {
    char *buffer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) die("mmap");
    if (options.huge) madvise(buffer, size, MADV_HUGEPAGE); /* a hint: failing is fine */
    memset(buffer, byte, size);
    return buffer;
}

static void configure(int fd) {
    int on = 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on)) die("TCP_NODELAY");
    if (*options.congestion
        && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, options.congestion, strlen(options.congestion)))
        fprintf(stderr, "wire: no %s here, the kernel's congestion control stays\n", options.congestion);
    if (options.send_buffer
        && setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &options.send_buffer, sizeof options.send_buffer))
        die("SO_SNDBUF");
    if (options.receive_buffer
        && setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &options.receive_buffer, sizeof options.receive_buffer))
        die("SO_RCVBUF");
}

/* Send prefix (with the sender's rank), header and the first block in one call, then the rest block by block. */
static void send_frame(int fd, char *payload) {
    char frame[FRAME_BYTES] = "WIRE";
    memcpy(frame + RANK_AT, &options.rank, sizeof options.rank);
    size_t sent = 0, total = FRAME_BYTES + options.payload;
    while (sent < total) {
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts};
        if (sent < FRAME_BYTES)
            parts[message.msg_iovlen++] = (struct iovec){frame + sent, FRAME_BYTES - sent};
        size_t start = sent < FRAME_BYTES ? 0 : sent - FRAME_BYTES, left = options.payload - start;
        parts[message.msg_iovlen++] = (struct iovec){payload + start, left < options.block ? left : options.block};
        ssize_t count = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) die("sendmsg");
        sent += (size_t)count;
    }
}

static void receive_exactly(int fd, char *into, size_t size) {
    while (size) {
        size_t want = size < options.block ? size : options.block;
        ssize_t count = recv(fd, into, want, MSG_WAITALL);
        if (count < 0 && errno == EINTR) continue;
        if (count == 0) errno = ECONNRESET;
        if (count <= 0) die("recv");
        into += count;
        size -= (size_t)count;
    }
}

/* Receive the payload into the buffer of the sender's rank; there are `ranks` of them. */
static void receive_frame(int fd, char **payloads, int ranks) {
    char frame[FRAME_BYTES];
    int rank;
    receive_exactly(fd, frame, FRAME_BYTES);
    memcpy(&rank, frame + RANK_AT, sizeof rank);
    if (rank < 0 || rank >= ranks) {
        errno = EPROTO;
        die("rank");
    }
    receive_exactly(fd, payloads[rank], options.payload);
}

/* Wait for all gradients; share in the update if `thread` is one of those that do. Returns what to send. */
static char *await_values(int step, int thread) {
    pthread_barrier_wait(&all_received);
    if (!options.adam) return (char *)state.values[0];
    if (thread < updaters) adam_share(&state, step, thread, updaters);
    pthread_barrier_wait(&all_updated);
    return (char *)state.values[(step + 1) % 2];
}

struct connection {
    int fd, thread;
};

static void *serve(void *argument) {
    struct connection *connection = argument;
    for (int step = 0; step < options.steps; step++) {
        receive_frame(connection->fd, gradients, options.workers);
        send_frame(connection->fd, await_values(step, connection->thread));
    }
    close(connection->fd);
    return NULL;
}

/* A helper has no connection: there are more processors than workers. */
static void *help(void *argument) {
    struct connection *helper = argument;
    for (int step = 0; step < options.steps; step++) await_values(step, helper->thread);
    return NULL;
}

/* Set up what is received and sent and, with --adam, what an update needs. Returns how many threads a step has. */
static int prepare_state(void) {
    gradients = calloc((size_t)options.workers, sizeof *gradients);
    if (!gradients) die("calloc");
    for (int i = 0; i < options.workers; i++) gradients[i] = touched_buffer(options.payload, 1);
    state.values[0] = (float *)touched_buffer(options.payload, 0);
    if (!options.adam) return options.workers;
    state.values[1] = (float *)touched_buffer(options.payload, 0);
    state.first = (float *)touched_buffer(options.payload, 0);
    state.second = (float *)touched_buffer(options.payload, 0);
    state.count = options.payload / sizeof(float);
    state.workers = options.workers;
    state.gradients = calloc((size_t)options.workers, sizeof *state.gradients);
    if (!state.gradients) die("calloc");
    for (int i = 0; i < options.workers; i++) state.gradients[i] = (float *)gradients[i];
    updaters = (int)sysconf(_SC_NPROCESSORS_ONLN);
    return updaters > options.workers ? updaters : options.workers;
}

static void write_port(int port) {
    char temporary[4096];
    snprintf(temporary, sizeof temporary, "%s.part", options.port_file);
    FILE *file = fopen(temporary, "w");
    if (!file || fprintf(file, "%d\n", port) < 0 || fclose(file) || rename(temporary, options.port_file))
        die("port file");
}

static void run_server(void) {
    int count = prepare_state();
    pthread_t *threads = calloc((size_t)count, sizeof *threads);
    struct connection *connections = calloc((size_t)count, sizeof *connections);
    if (!threads || !connections) die("calloc");
    if (pthread_barrier_init(&all_received, NULL, (unsigned)count)
        || pthread_barrier_init(&all_updated, NULL, (unsigned)count))
        die("barrier");

    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (listener < 0) die("socket");
    configure(listener); /* a receive buffer must be set before the handshake to be advertised */
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64)
        || getsockname(listener, (struct sockaddr *)&address, &length))
        die("listen");
    write_port(ntohs(address.sin_port));

    for (int i = 0; i < count; i++) connections[i].thread = i;
    for (int i = options.workers; i < count; i++)
        if (pthread_create(&threads[i], NULL, help, &connections[i])) die("pthread_create");
    for (int i = 0; i < options.workers; i++) {
        connections[i].fd = accept(listener, NULL, NULL);
        if (connections[i].fd < 0) die("accept");
        configure(connections[i].fd);
        if (pthread_create(&threads[i], NULL, serve, &connections[i])) die("pthread_create");
    }
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static void write_values(const char *received) {
    FILE *file = fopen(options.values_file, "wb");
    if (!file || fwrite(received, 1, options.payload, file) != options.payload || fclose(file)) die("values file");
}

static void run_worker(void) {
    char *gradient = touched_buffer(options.payload, 1), *received = touched_buffer(options.payload, 1);
    if (options.adam) fill_gradient((float *)gradient, options.payload / sizeof(float), options.rank);
    int64_t *returned_ns = calloc((size_t)options.steps, sizeof *returned_ns);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)options.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!returned_ns || fd < 0) die("socket");
    configure(fd);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    for (int step = 0; step < options.steps; step++) {
        send_frame(fd, gradient);
        receive_frame(fd, &received, 1);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        returned_ns[step] = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    }
    close(fd);
    if (options.values_file) write_values(received);
    if (options.rank) return;
    printf("{\"returned_ns\": [");
    for (int step = 0; step < options.steps; step++)
        printf("%s%lld", step ? ", " : "", (long long)returned_ns[step]);
    printf("]}\n");
}

static void parse(int count, char **arguments) {
    for (int i = 2; i + 1 < count; i += 2) {
        const char *name = arguments[i], *value = arguments[i + 1];
        if (!strcmp(name, "--port-file")) options.port_file = value;
        else if (!strcmp(name, "--values-file")) options.values_file = value;
        else if (!strcmp(name, "--congestion")) options.congestion = value;
        else if (!strcmp(name, "--port")) options.port = atoi(value);
        else if (!strcmp(name, "--rank")) options.rank = atoi(value);
        else if (!strcmp(name, "--workers")) options.workers = atoi(value);
        else if (!strcmp(name, "--steps")) options.steps = atoi(value);
        else if (!strcmp(name, "--payload")) options.payload = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--block")) options.block = strtoull(value, NULL, 10);
        else if (!strcmp(name, "--send-buffer")) options.send_buffer = atoi(value);
        else if (!strcmp(name, "--receive-buffer")) options.receive_buffer = atoi(value);
        else if (!strcmp(name, "--huge")) options.huge = atoi(value);
        else if (!strcmp(name, "--adam")) options.adam = atoi(value);
        else {
            fprintf(stderr, "wire: unknown option %s\n", name);
            exit(2);
        }
    }
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    parse(count, arguments);
    if (options.steps < 1 || options.payload < 1 || options.block < 1) mode = "";
    if (options.adam && options.payload % sizeof(float)) mode = "";
    if (!strcmp(mode, "server") && options.port_file && options.workers > 0) run_server();
    else if (!strcmp(mode, "worker") && options.port > 0) run_worker();
    else {
        fprintf(stderr, "usage: wire server|worker --steps S --payload BYTES ... (see the head of wire.c)\n");
        return 2;
    }
    return 0;
}
