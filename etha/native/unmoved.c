/* Whether tensors still lie where they did: included by executor.c.
 *
 * Tensors are read by the C functions that a framework gives with the DLPack standard (version 1, __dlpack_c_exchange_api__),
 * so no headers of Python or torch are needed. The caller holds the interpreter's lock and references to all tensors. */

typedef struct {
    void *data;
    int32_t device_type, device;
    int32_t axes;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} dl_tensor;

typedef struct {
    uint32_t major, minor;
    const void *previous;
    int (*allocate)(void), (*take)(void), (*give)(void); /* not used here */
    int (*look)(void *tensor, dl_tensor *found);         /* 0, or -1 with a Python exception set */
} dl_functions;

/* One tensor. Its row of numbers is data, type, shape, strides. */
typedef struct {
    void *tensor;
    const void *near[2]; /* where the framework keeps the tensor and its storage: fetched early, never read here */
    uint64_t row;        /* index of its first number */
} etha_place;

INLINE int64_t type_of(const dl_tensor *t) {
    return (int64_t)((uint64_t)(uint16_t)t->axes << 32 | (uint64_t)t->lanes << 16 | (uint64_t)t->code << 8 | t->bits);
}

INLINE int64_t address_of(const dl_tensor *t) { return (int64_t)((uintptr_t)t->data + t->offset); }

/* Writes the rows of `n` tensors of at most `axes` axes: how many numbers that were; 0 if there is no way to, -1 with a Python
 * exception. `rows` has room for 2 + 2 * axes numbers of each. */
int64_t etha_note_places(const dl_functions *functions, etha_place *places, int64_t *rows, int64_t n, int64_t axes) {
    if (functions->major != 1 || !functions->look) return 0;
    int64_t end = 0;
    for (int64_t i = 0; i < n; i++) {
        dl_tensor t;
        if (functions->look(places[i].tensor, &t)) return -1;
        if (t.axes > axes || (t.axes && !t.strides)) return 0;
        int64_t *row = rows + end;
        places[i].row = (uint64_t)end;
        row[0] = address_of(&t), row[1] = type_of(&t);
        for (int64_t axis = 0; axis < t.axes; axis++) row[2 + axis] = t.shape[axis], row[2 + t.axes + axis] = t.strides[axis];
        end += 2 + 2 * t.axes;
    }
    return end;
}

/* Far enough ahead that memory has answered, near enough that nothing is pushed out of the cache again. */
enum { AHEAD = 6 };

/* The first of `n` tensors that is not where its row says; n if there is none, -1 with a Python exception. */
int64_t etha_first_moved(const dl_functions *functions, const etha_place *places, const int64_t *rows, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) { /* each tensor is five lines of memory that nobody has used since the last transfer */
            const etha_place *ahead = places + i + AHEAD;
            __builtin_prefetch(ahead->tensor);
            for (int line = 0; line < 4; line++) __builtin_prefetch((const char *)ahead->near[0] + 64 * line);
            __builtin_prefetch(ahead->near[1]);
            __builtin_prefetch((const char *)ahead->near[1] + 64);
        }
        dl_tensor t;
        if (functions->look(places[i].tensor, &t)) return -1;
        const int64_t *row = rows + places[i].row;
        if (address_of(&t) != row[0] || type_of(&t) != row[1]) return i;
        for (int64_t axis = 0; axis < t.axes; axis++)
            if (t.shape[axis] != row[2 + axis] || t.strides[axis] != row[2 + t.axes + axis]) return i;
    }
    return n;
}

uint64_t etha_place_bytes(void) { return sizeof(etha_place); }
