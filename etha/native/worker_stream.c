/* Sends rows of this process's own memory over a connected stream socket, or receives into them: included by executor.c.
 *
 * The socket belongs to the agent, which has lent it. It is blocking, and whoever shuts it down, here or in the agent, ends
 * the work at once. A thread of its own does it, because it waits for the network, and needs nothing of the interpreter:
 * its end is told by an eventfd. */

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* Rows and bytes of one system call; wake up only for so many bytes while at least as many are still to come. */
enum { STREAM_ROWS = 512, STREAM_CALL = 2 << 20, STREAM_WORTH = 256 << 10, STREAM_PADDING = 64 };
/* Instead of an errno: the other end has closed the stream. */
enum { STREAM_ENDED = -1 };

typedef struct {
    struct iovec *rows; /* address, bytes; at address 0 lies padding of fewer than STREAM_PADDING bytes, which has no memory */
    uint64_t nrows, nbytes;
    int32_t fd, end_fd; /* the socket; an eventfd that is written when nothing is moved any more */
    uint32_t sends;
    int32_t error; /* an errno or STREAM_ENDED */
    uint64_t done; /* bytes that were moved */
} etha_worker_stream;

/* The rows from number `*at` on, without the first `skip` bytes of the first, up to STREAM_CALL bytes. */
static uint64_t stream_window(const etha_worker_stream *s, uint64_t at, uint64_t skip, uint8_t *padding, struct iovec *window) {
    uint64_t n = 0, room = STREAM_CALL;
    for (; at < s->nrows && n < STREAM_ROWS && room; at++, n++) {
        uint64_t left = s->rows[at].iov_len - skip, some = left < room ? left : room;
        uint8_t *base = s->rows[at].iov_base;
        window[n].iov_base = base ? base + skip : padding;
        window[n].iov_len = some;
        room -= some;
        skip = 0;
    }
    return n;
}

static void move_stream(etha_worker_stream *s) {
    struct iovec window[STREAM_ROWS];
    uint8_t padding[STREAM_PADDING] = {0};
    uint64_t at = 0, skip = 0;
    int lowest = 1, usual = 1;
    while (s->done < s->nbytes) {
        struct msghdr m = {.msg_iov = window, .msg_iovlen = stream_window(s, at, skip, padding, window)};
        ssize_t n;
        if (s->sends) {
            n = sendmsg(s->fd, &m, MSG_NOSIGNAL);
        } else {
            uint64_t left = s->nbytes - s->done;
            int worth = left < STREAM_WORTH ? (int)left : STREAM_WORTH;
            if (worth != lowest && !setsockopt(s->fd, SOL_SOCKET, SO_RCVLOWAT, &worth, sizeof worth)) lowest = worth;
            /* A call that waited itself could take some bytes and then sleep for as many as are never to come. */
            struct pollfd ready = {s->fd, POLLIN, 0};
            n = poll(&ready, 1, -1);
            if (n > 0) n = recvmsg(s->fd, &m, MSG_DONTWAIT);
        }
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) {
            s->error = n < 0 ? errno : STREAM_ENDED;
            break;
        }
        __atomic_fetch_add(&s->done, (uint64_t)n, __ATOMIC_RELAXED);
        for (skip += (uint64_t)n; at < s->nrows && skip >= s->rows[at].iov_len; at++) skip -= s->rows[at].iov_len;
    }
    if (lowest != usual) setsockopt(s->fd, SOL_SOCKET, SO_RCVLOWAT, &usual, sizeof usual); /* the agent reads on */
}

static void *stream_work(void *of) {
    etha_worker_stream *s = of;
    int fd = s->end_fd;
    uint64_t one = 1;
    move_stream(s);
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) continue; /* after this nothing of `s` is touched */
    return NULL;
}

/* Begin. 0, or the errno if no thread can be had: then nothing was moved, and nothing is written to `end_fd`. */
int etha_start_worker_stream(etha_worker_stream *s) {
    pthread_t thread;
    pthread_attr_t apart;
    sigset_t all, before;
    sigfillset(&all); /* Python's signals go to threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&apart);
    pthread_attr_setdetachstate(&apart, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &apart, stream_work, s);
    pthread_attr_destroy(&apart);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

uint64_t etha_worker_stream_bytes(void) { return sizeof(etha_worker_stream); }
