/* Streams to the members of other hosts: included by executor.c, to whose members they are as if they shared memory.
 *
 *     this process                                             a process of another host
 *     own memfd: words, descriptors, windows, rings   --->     mirror of it: private memory with the same layout
 *     mirror of the other's memfd                     <---     its own memfd
 *
 * One thread of each member serves one TCP connection per member of another host. It sends what the other one will read
 * of the own memfd, and writes what arrives into the mirror. Everything else is done on mirrors as on memfds.
 *
 * A frame is a head and its payload. Frames of one connection arrive in their order, so whoever sees a posted phase in
 * a mirror sees the bytes that were sent before it. There is always room for what arrives: the schedule lets a member
 * fill a window again only after all its readers have posted that they have read it, and a ring has a tail. So this
 * thread never waits for another one, and neither a message nor a call can block the other. */

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* BYTES: of windows and descriptors, `at` their offset in the memfd. RING: `at` is the head before them. TO_POST, TO_GIVE_UP,
 * TO_TAIL: the new value of a word. TO_CAUSE: why the sender ends the group. TO_CLAIM: whose cause rank 0 has found to be the
 * first, and its text. BEAT: the sender lives. */
enum { BYTES = 1, RING = 2, TO_POST = 3, TO_GIVE_UP = 4, TO_TAIL = 5, TO_CAUSE = 6, TO_CLAIM = 7, BEAT = 8 };
/* Why a stream has ended. */
enum { OPEN = 0, END_OF_STREAM = 1, BROKEN = 2, SILENT = 3, NONSENSE = 4, LEFT = 5 };

#define SEND_QUEUE 1024 /* ranges that are to be sent to one member */
#define BATCH 32        /* frames of one system call */
#define TURN (1u << 20) /* bytes after which another member has its turn */
#define ASIDE 8192      /* bytes that are read ahead of what is expected */

typedef struct { uint32_t kind, nbytes; uint64_t at; } frame;
typedef struct { const uint8_t *data; uint64_t at, nbytes; } sending;

typedef struct {
    int32_t fd, death_fd; /* -1: a member of this host, or ended; an eventfd that becomes readable at the end */
    uint32_t ended, error;
    _Atomic uint64_t pushed, taken, sent; /* of the queue: by the caller's thread, into frames, to the kernel */
    sending queue[SEND_QUEUE];
    /* What the other one has been sent of the own words. */
    uint64_t posted, gave_up, head, tail;
    uint32_t cause, claim;
    int64_t heard_ns, spoke_ns;
    uint32_t full, finished, reading, nframes;
    uint32_t npieces, piece;
    frame frames[BATCH];
    struct iovec pieces[2 * BATCH];
    /* What is being received. */
    frame in;
    uint8_t *target;
    uint64_t done;
    uint32_t begun, have, used, pad;
    uint8_t aside[ASIDE];
} stream;

struct etha_streams {
    etha_group *group;
    stream *streams;    /* by rank */
    const uint8_t *far; /* by rank: 1 if it is a member of another host */
    int32_t wake_fd, claim_fd;
    _Atomic uint32_t asleep, cause_ready, closing;
    uint32_t beat_ms;
    uint64_t cause_offset, cause_bytes;
    _Atomic uint32_t flushing, withdrawn, is_withdrawn; /* someone waits for `sent`; asks, and has, what etha_withdraw says */
};

uint64_t etha_stream_bytes(void) { return sizeof(stream); }

/* Wake the thread of the streams, if it sleeps. The caller has had a full fence since it wrote what there is to send. */
static void wake_streams(const etha_group *g) {
    uint64_t one = 1;
    if (atomic_load_explicit(&g->streams->asleep, memory_order_relaxed) && write(g->streams->wake_fd, &one, 8) < 0) return;
}

void etha_wake_streams(etha_group *g) {
    atomic_thread_fence(memory_order_seq_cst);
    wake_streams(g);
}

/* Have `nbytes` at `data` sent to the member as the bytes at offset `at` of the own memfd. They must stay until they are
 * sent (FLUSH), or until etha_withdraw. 0: too much is waiting to be sent. One thread at a time calls it. */
int etha_send(etha_group *g, uint32_t peer, const uint8_t *data, uint64_t at, uint64_t nbytes) {
    stream *t = g->streams->streams + peer;
    uint64_t pushed = atomic_load_explicit(&t->pushed, memory_order_relaxed);
    if (pushed - atomic_load_explicit(&t->taken, memory_order_acquire) >= SEND_QUEUE) return 0;
    t->queue[pushed % SEND_QUEUE] = (sending){data, at, nbytes};
    atomic_store_explicit(&t->pushed, pushed + 1, memory_order_release);
    return 1;
}

typedef struct { etha_run_args *args; const step *step; } send_wait;

static int look_at_queue(void *what) {
    send_wait *w = what;
    etha_group *g = w->args->group;
    const step *s = w->step;
    if (g->streams->streams[s->n].ended) return GAVE_UP;
    const uint8_t *own = g->pages[g->rank], *data = w->args->spaces[s->src_space] + s->src;
    return etha_send(g, s->n, data, (uint64_t)(w->args->spaces[s->dst_space] + s->dst - own), s->count) ? DONE : NOTHING;
}

static int run_send(etha_run_args *a, const step *s, limits *l) {
    etha_group *g = a->group;
    if (!g->streams || s->n >= g->size || !g->streams->far[s->n]) return INVALID;
    send_wait w = {a, s};
    int result = look_at_queue(&w);
    if (result == NOTHING) {
        etha_wake_streams(g);
        result = wait_until(g, l, look_at_queue, &w);
    }
    if (result == GAVE_UP || result == TIMEOUT) note_failed(a, s->n);
    return result;
}

/* Whether the kernel has everything that was sent. Who has ended takes nothing any more. */
static int look_at_sent(void *what) {
    etha_group *g = what;
    for (uint32_t r = 0; r < g->size; r++) {
        stream *t = g->streams->streams + r;
        if (g->streams->far[r] && !t->ended && atomic_load(&t->sent) != atomic_load(&t->pushed)) return NOTHING;
    }
    return DONE;
}

static int run_flush(etha_run_args *a, limits *l) {
    etha_group *g = a->group;
    if (!g->streams) return INVALID;
    atomic_store(&g->streams->flushing, 1); /* before the first look, as in an eventcount */
    int result = wait_until(g, l, look_at_sent, g);
    if (result != AGAIN) atomic_store(&g->streams->flushing, 0);
    if (result != TIMEOUT) return result;
    for (uint32_t r = 0; r < g->size; r++) {
        stream *t = g->streams->streams + r;
        if (g->streams->far[r] && !t->ended && atomic_load(&t->sent) != atomic_load(&t->pushed)) note_failed(a, r);
    }
    return a->failed_rank == ALL ? DONE : TIMEOUT;
}

/* A call has failed: when this returns, nothing outside of the own memfd is read any more. What was to be sent of a
 * tensor is copied to where it belongs in the own memfd, because a frame that has begun must be sent whole. */
void etha_withdraw(etha_group *g) {
    etha_streams *s = g->streams;
    uint64_t one = 1;
    if (!s) return;
    atomic_store(&s->withdrawn, 1);
    while (!atomic_load(&s->is_withdrawn)) {
        if (write(s->wake_fd, &one, 8) < 0 && errno != EAGAIN) return;
        syscall(SYS_futex, &s->is_withdrawn, FUTEX_WAIT, 0, NULL, NULL, 0);
    }
}

/* ---- sending ---- */

static const uint8_t *copied_aside(etha_group *g, uint64_t at, const uint8_t *data, uint64_t nbytes) {
    uint8_t *own = g->pages[g->rank] + at;
    if (data != own) memcpy(own, data, nbytes);
    return own;
}

/* On the thread of the streams: what etha_withdraw waits for. */
static void withdraw(etha_streams *s) {
    etha_group *g = s->group;
    for (uint32_t r = 0; r < g->size; r++) {
        stream *t = s->streams + r;
        if (!s->far[r] || t->fd < 0) continue;
        uint64_t pushed = atomic_load_explicit(&t->pushed, memory_order_acquire);
        for (uint64_t i = atomic_load_explicit(&t->taken, memory_order_relaxed); i < pushed; i++) {
            sending *each = t->queue + i % SEND_QUEUE;
            each->data = copied_aside(g, each->at, each->data, each->nbytes);
        }
        for (uint32_t i = 0, p = 0; i < t->nframes; i++) {
            const frame *f = t->frames + i;
            struct iovec *payload = t->pieces + ++p;
            if (!f->nbytes) continue;
            p++;
            if (f->kind != BYTES || payload < t->pieces + t->piece) continue;
            uint64_t done = f->nbytes - payload->iov_len;
            payload->iov_base = (void *)copied_aside(g, f->at + done, payload->iov_base, payload->iov_len);
        }
    }
    atomic_store(&s->is_withdrawn, 1);
    syscall(SYS_futex, &s->is_withdrawn, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int must_withdraw(etha_streams *s) { return atomic_load(&s->withdrawn) && !atomic_load(&s->is_withdrawn); }

static int has_room(const stream *t, uint32_t more) { return t->nframes + more <= BATCH; }

static void add_frame(stream *t, uint32_t kind, uint64_t at, const uint8_t *data, uint64_t nbytes) {
    frame *f = t->frames + t->nframes++;
    *f = (frame){kind, (uint32_t)nbytes, at};
    t->pieces[t->npieces++] = (struct iovec){f, sizeof *f};
    if (nbytes) t->pieces[t->npieces++] = (struct iovec){(void *)data, nbytes};
}

static uint64_t cause_length(const etha_streams *s, const uint8_t *page) {
    uint32_t n;
    memcpy(&n, page + s->cause_offset, 4);
    return n <= s->cause_bytes - 4 ? n + 4ull : 4;
}

/* Make frames of what the member does not know yet. Words are read in the opposite order of that in which they are sent,
 * so what a word says has been put among the frames before it. */
static void compose(etha_streams *s, uint32_t r, int64_t now) {
    etha_group *g = s->group;
    stream *t = s->streams + r;
    uint8_t *own = g->pages[g->rank], *out = ring_of(g, g->rank, r);
    t->nframes = t->npieces = t->piece = 0;
    int closing = (int)atomic_load(&s->closing);
    uint64_t gave_up = atomic_load_explicit(word(own, GAVE_UP_AT), memory_order_acquire);
    uint64_t posted = atomic_load_explicit(word(own, POSTED), memory_order_acquire);
    uint64_t pushed = atomic_load_explicit(&t->pushed, memory_order_acquire);
    uint64_t taken = atomic_load_explicit(&t->taken, memory_order_relaxed);
    for (; taken < pushed && has_room(t, 1); taken++) {
        const sending *each = t->queue + taken % SEND_QUEUE;
        add_frame(t, BYTES, each->at, each->data, each->nbytes);
    }
    atomic_store_explicit(&t->taken, taken, memory_order_release);
    if (!has_room(t, 8)) return; /* the rest goes with the next frames */
    if (posted > t->posted) add_frame(t, TO_POST, t->posted = posted, NULL, 0);
    uint64_t head = atomic_load_explicit(word(out, 0), memory_order_acquire);
    while (head != t->head && has_room(t, 6)) {
        uint64_t begin = t->head % g->ring_bytes, n = head - t->head;
        if (n > g->ring_bytes) break;
        if (n > g->ring_bytes - begin) n = g->ring_bytes - begin;
        add_frame(t, RING, t->head, out + RING_LINES + begin, n);
        t->head += n;
    }
    uint64_t tail = atomic_load_explicit(word(ring_of(g, r, g->rank), 64), memory_order_acquire);
    if (tail != t->tail) add_frame(t, TO_TAIL, t->tail = tail, NULL, 0);
    if (!t->cause && atomic_load_explicit(&s->cause_ready, memory_order_acquire)) {
        add_frame(t, TO_CAUSE, 0, own + s->cause_offset, cause_length(s, own));
        t->cause = 1;
    }
    uint64_t claim = g->rank ? 0 : atomic_load_explicit(word(own, CLAIM), memory_order_acquire);
    if (!t->claim && claim && claim <= g->size) {
        uint8_t *page = g->pages[claim - 1];
        add_frame(t, TO_CLAIM, claim, page + s->cause_offset, cause_length(s, page));
        t->claim = 1;
    }
    if (gave_up && !t->gave_up) add_frame(t, TO_GIVE_UP, t->gave_up = gave_up, NULL, 0);
    if (!t->nframes && !closing && now - t->spoke_ns >= s->beat_ms * 1000000LL) add_frame(t, BEAT, 0, NULL, 0);
    if (!t->nframes && closing && !t->finished) {
        t->finished = 1; /* the other one closes its side when it has read everything */
        shutdown(t->fd, SHUT_WR);
    }
}

static void end_stream(etha_streams *s, uint32_t r, uint32_t why, int error) {
    stream *t = s->streams + r;
    if (t->fd < 0) return;
    uint64_t one = 1;
    int fd = t->fd;
    t->fd = -1; /* first, because a child that is forked now closes what it finds */
    close(fd);
    t->error = (uint32_t)error;
    t->ended = atomic_load(&s->closing) ? LEFT : why;
    if (write(t->death_fd, &one, 8) < 0) return;
    etha_ring(s->group->pages[s->group->rank]);
}

/* Send until there is nothing more, the connection is full, or others have their turn. 1: there is more. */
static int speak(etha_streams *s, uint32_t r, int64_t now) {
    stream *t = s->streams + r;
    uint64_t moved = 0;
    t->full = 0;
    while (t->fd >= 0 && moved < TURN) {
        if (t->piece == t->npieces) {
            uint64_t taken = atomic_load_explicit(&t->taken, memory_order_relaxed);
            atomic_store_explicit(&t->sent, taken, memory_order_release);
            compose(s, r, now);
            atomic_thread_fence(memory_order_seq_cst); /* the poster's half of the eventcount */
            uint64_t pushed = atomic_load_explicit(&t->pushed, memory_order_relaxed);
            if (pushed - taken >= SEND_QUEUE || (pushed == taken && atomic_load(&s->flushing)))
                ring_if_asleep(s->group->pages[s->group->rank]); /* it waits for room, or for the end */
            if (!t->npieces) return 0;
        }
        if (must_withdraw(s)) withdraw(s);
        struct msghdr m = {.msg_iov = t->pieces + t->piece, .msg_iovlen = t->npieces - t->piece};
        ssize_t n = sendmsg(t->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) t->full = 1;
            else t->full = t->finished = 1; /* what the other one has sent before is still read; then the stream ends */
            return 0;
        }
        moved += (uint64_t)n;
        t->spoke_ns = now;
        while (n > 0) {
            struct iovec *p = t->pieces + t->piece;
            uint64_t k = (uint64_t)n < p->iov_len ? (uint64_t)n : p->iov_len;
            p->iov_base = (uint8_t *)p->iov_base + k;
            p->iov_len -= k;
            n -= (ssize_t)k;
            if (!p->iov_len) t->piece++;
        }
    }
    return t->fd >= 0;
}

/* ---- receiving ---- */

/* Whether a member may send such a frame now, and where its payload goes. */
static int is_sensible(etha_streams *s, uint32_t r, const frame *f, uint8_t **target) {
    etha_group *g = s->group;
    uint8_t *page = g->pages[r];
    *target = NULL;
    switch (f->kind) {
    case BYTES:
        *target = page + f->at;
        return f->at >= g->descriptor_offset && f->at <= g->ring_offset && f->nbytes <= g->ring_offset - f->at;
    case RING: {
        uint8_t *ring = ring_of(g, r, g->rank);
        uint64_t head = atomic_load_explicit(word(ring, 0), memory_order_relaxed);
        uint64_t tail = atomic_load_explicit(word(ring, 64), memory_order_acquire);
        *target = ring + RING_LINES + f->at % g->ring_bytes;
        return f->at == head && f->nbytes <= g->ring_bytes - (head - tail) &&
               f->nbytes <= g->ring_bytes - f->at % g->ring_bytes;
    }
    case TO_CAUSE:
        *target = page + s->cause_offset;
        return f->nbytes <= s->cause_bytes;
    case TO_CLAIM:
        if (r || !f->at || f->at > g->size || f->nbytes > s->cause_bytes || f->nbytes > ASIDE) return 0;
        if (s->far[f->at - 1]) *target = g->pages[f->at - 1] + s->cause_offset;
        return 1;
    case TO_POST:
        return !f->nbytes && f->at >= atomic_load_explicit(word(page, POSTED), memory_order_relaxed);
    case TO_GIVE_UP: case TO_TAIL: case BEAT:
        return !f->nbytes;
    default:
        return 0;
    }
}

/* A frame has arrived whole. 1: somebody may wait for what it says. */
static int apply(etha_streams *s, uint32_t r, const frame *f) {
    etha_group *g = s->group;
    uint8_t *page = g->pages[r];
    uint64_t one = 1;
    switch (f->kind) {
    case RING: atomic_store_explicit(word(ring_of(g, r, g->rank), 0), f->at + f->nbytes, memory_order_release); break;
    case TO_POST: atomic_store_explicit(word(page, POSTED), f->at, memory_order_release); break;
    case TO_GIVE_UP: atomic_store_explicit(word(page, GAVE_UP_AT), f->at, memory_order_release); break;
    case TO_TAIL: atomic_store_explicit(word(ring_of(g, g->rank, r), 64), f->at, memory_order_release); break;
    case TO_CAUSE:
        if (!g->rank) while (!etha_claim_cause(page, r)) relax(); /* whoever takes it needs a moment only */
        break;
    case TO_CLAIM:
        atomic_store_explicit(word(g->pages[0], CLAIM), f->at, memory_order_release);
        if (write(s->claim_fd, &one, 8) < 0) return 1;
        break;
    default: return 0;
    }
    return 1;
}

/* Take what has been read. 0: it makes no sense. Who waits is woken by words only, because bytes alone end no wait, and a
 * large call would otherwise be woken for every piece that a system call reads. */
static int take(etha_streams *s, uint32_t r) {
    stream *t = s->streams + r;
    int news = 0;
    for (;;) {
        if (!t->begun) {
            if (t->have - t->used < sizeof t->in) break;
            memcpy(&t->in, t->aside + t->used, sizeof t->in);
            t->used += sizeof t->in;
            if (!is_sensible(s, r, &t->in, &t->target)) return 0;
            t->begun = 1;
            t->done = 0;
        }
        uint64_t n = t->in.nbytes - t->done;
        if (n > t->have - t->used) n = t->have - t->used;
        if (n && t->target) memcpy(t->target + t->done, t->aside + t->used, n);
        t->used += (uint32_t)n;
        t->done += n;
        if (t->done < t->in.nbytes) break;
        news |= apply(s, r, &t->in);
        t->begun = 0;
    }
    memmove(t->aside, t->aside + t->used, t->have - t->used);
    t->have -= t->used;
    t->used = 0;
    if (news) {
        atomic_thread_fence(memory_order_seq_cst); /* the poster's half of the eventcount */
        ring_if_asleep(s->group->pages[s->group->rank]);
    }
    return 1;
}

/* Read what there is. A payload is read to where it belongs, and what follows it in the same system call. */
static void hear(etha_streams *s, uint32_t r, int64_t now) {
    stream *t = s->streams + r;
    for (uint64_t moved = 0; moved < TURN;) {
        struct iovec parts[2];
        struct msghdr m = {.msg_iov = parts};
        uint64_t left = t->begun && t->target ? t->in.nbytes - t->done : 0;
        if (left) parts[m.msg_iovlen++] = (struct iovec){t->target + t->done, left};
        parts[m.msg_iovlen++] = (struct iovec){t->aside + t->have, ASIDE - t->have};
        ssize_t n = recvmsg(t->fd, &m, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            end_stream(s, r, n ? BROKEN : END_OF_STREAM, n ? errno : 0);
            return;
        }
        moved += (uint64_t)n;
        t->heard_ns = now;
        uint64_t first = (uint64_t)n < left ? (uint64_t)n : left;
        t->done += first;
        t->have += (uint32_t)((uint64_t)n - first);
        if (!take(s, r)) {
            end_stream(s, r, NONSENSE, (int)t->in.kind);
            return;
        }
        if ((uint64_t)n < left + ASIDE / 2) return; /* that was all */
    }
}

/* ---- the thread ---- */

/* Whether there is something to send that was not there before this thread said that it sleeps. */
static int has_news(etha_streams *s) {
    etha_group *g = s->group;
    uint8_t *own = g->pages[g->rank];
    for (uint32_t r = 0; r < g->size; r++) {
        stream *t = s->streams + r;
        if (t->fd < 0 || t->full) continue;
        if (atomic_load(&t->pushed) != atomic_load(&t->taken) || atomic_load(word(own, POSTED)) > t->posted) return 1;
        if (atomic_load(word(ring_of(g, g->rank, r), 0)) != t->head) return 1;
        if (atomic_load(word(ring_of(g, r, g->rank), 64)) != t->tail) return 1;
        if (!t->gave_up && atomic_load(word(own, GAVE_UP_AT))) return 1;
        if (!t->cause && atomic_load(&s->cause_ready)) return 1;
        if (!g->rank && !t->claim && atomic_load(word(own, CLAIM))) return 1;
        if (!t->finished && atomic_load(&s->closing)) return 1;
    }
    return 0;
}

/* Serve all streams until `closing` and all have been told the last words, or have been silent for a beat then. */
void etha_serve_streams(etha_streams *s) {
    etha_group *g = s->group;
    struct pollfd polls[g->size + 1];
    uint32_t who[g->size + 1];
    int64_t beat = s->beat_ms * 1000000LL, closing_since = 0, now = now_ns();
    for (uint32_t r = 0; r < g->size; r++) s->streams[r].heard_ns = s->streams[r].spoke_ns = now;
    for (;;) {
        int more = 0;
        uint32_t open = 0;
        now = now_ns();
        if (atomic_load(&s->closing) && !closing_since) closing_since = now;
        if (must_withdraw(s)) withdraw(s);
        for (uint32_t r = 0; r < g->size; r++)
            if (s->streams[r].fd >= 0) more |= speak(s, r, now), open++;
        if (closing_since && (!open || now - closing_since >= beat)) break;
        atomic_store(&s->asleep, 1);
        atomic_thread_fence(memory_order_seq_cst); /* the sleeper's half of the eventcount */
        if (has_news(s) || must_withdraw(s) || (!closing_since && atomic_load(&s->closing))) more = 1;
        int64_t until = closing_since ? closing_since + beat : INT64_MAX;
        nfds_t n = 0;
        for (uint32_t r = 0; r < g->size; r++) {
            stream *t = s->streams + r;
            if (t->fd < 0) continue;
            int64_t next = t->spoke_ns + beat < t->heard_ns + 3 * beat ? t->spoke_ns + beat : t->heard_ns + 3 * beat;
            if (t->full) next = t->heard_ns + 3 * beat;
            if (next < until) until = next;
            who[n] = r;
            polls[n++] = (struct pollfd){t->fd, (short)(POLLIN | (t->full && !t->finished ? POLLOUT : 0)), 0};
        }
        polls[n++] = (struct pollfd){s->wake_fd, POLLIN, 0};
        int64_t ms = until == INT64_MAX ? -1 : until <= now ? 0 : (until - now) / 1000000 + 1;
        int ready = poll(polls, n, more ? 0 : (int)ms);
        atomic_store(&s->asleep, 0);
        if (ready < 0) continue;
        now = now_ns();
        uint64_t rung;
        if (polls[n - 1].revents && read(s->wake_fd, &rung, 8) < 0 && errno != EAGAIN) break;
        for (nfds_t i = 0; i + 1 < n; i++) {
            stream *t = s->streams + who[i];
            if (polls[i].revents & POLLOUT) t->full = 0;
            if (polls[i].revents & ~POLLOUT) hear(s, who[i], now);
            else if (now - t->heard_ns >= 3 * beat) end_stream(s, who[i], SILENT, 0);
        }
    }
    for (uint32_t r = 0; r < g->size; r++) end_stream(s, r, LEFT, 0);
    withdraw(s);
}
