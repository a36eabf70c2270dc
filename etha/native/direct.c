/* A request of a worker's thread and what its agent answers, without the interpreter's lock: included by executor.c.
 *
 * All that has come stays in `in` until Python has handled it, so an interrupt between two calls loses nothing. */

#include <poll.h>
#include <sys/socket.h>

enum { HEARD, WOKEN, SLICE_OVER, ENDED, INTERRUPTED };

typedef struct {
    int32_t fd, wake, also;   /* the connection; readable as soon as another thread wants this one's attention; what else
                                 ends a wait, -1 for nothing */
    int32_t slice_ms;         /* longest wait */
    uint8_t *out, *in;
    uint64_t out_bytes, sent; /* bytes to be sent, and that have been */
    uint64_t in_bytes, got;   /* room, and bytes that have come */
    int32_t error;            /* errno of ENDED, 0 if the other end has closed */
} etha_direct;

/* Sends what is left to send, then waits for more bytes. HEARD: `got` has grown. */
int etha_exchange(etha_direct *d) {
    for (;;) {
        while (d->sent < d->out_bytes) {
            ssize_t n = send(d->fd, d->out + d->sent, d->out_bytes - d->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) break;
            if (n < 0 && errno == EINTR) return INTERRUPTED;
            if (n < 0) return d->error = errno, ENDED;
            d->sent += (uint64_t)n;
        }
        struct pollfd on[3] = {
            {.fd = d->fd, .events = (short)(POLLIN | (d->sent < d->out_bytes ? POLLOUT : 0))},
            {.fd = d->wake, .events = POLLIN},
            {.fd = d->also, .events = POLLIN},
        };
        int ready = poll(on, 3, d->slice_ms);
        if (ready < 0) return errno == EINTR ? INTERRUPTED : (d->error = errno, ENDED);
        if (ready == 0) return SLICE_OVER;
        if (on[0].revents & ~POLLOUT) {
            ssize_t n = recv(d->fd, d->in + d->got, d->in_bytes - d->got, MSG_DONTWAIT);
            if (n > 0) return d->got += (uint64_t)n, HEARD;
            if (n == 0) return d->error = 0, ENDED;
            if (errno == EINTR) return INTERRUPTED;
            if (errno != EAGAIN) return d->error = errno, ENDED;
        }
        if (on[1].revents || on[2].revents) return WOKEN;
    }
}

uint64_t etha_direct_bytes(void) { return sizeof(etha_direct); }
