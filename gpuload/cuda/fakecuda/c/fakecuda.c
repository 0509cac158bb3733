// A stand-in for libcuda.so.1 that needs no device. It keeps what callers of the driver get wrong:
//
//   - a device pointer is no host pointer: it has bit 56, and touching it from the host faults;
//   - a copy reads its source when it is executed, on a thread of its stream; with LAZY=1 not before somebody waits;
//   - a source that is not pinned is copied at once and counted; a copy out of bounds is refused;
//   - calls on a thread without a context are refused, as are streams and events of another context;
//   - after error 700 a context is of no more use: only its last release frees its memory;
//   - a handle for another process is refused in this one, and names a file that ends with its process;
//   - memory that is created apart from its address is modelled in vmm.c.
//
// Settings and counters are listed below. FAKECUDA_name in the environment sets one when cuInit is called, and
// fakecuda_set at any time. Safe for concurrent use.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713, NOT_SUPPORTED = 801
};

#define DEVICE_BIT (1ull << 56)
#define MAX_DEVICES 8
#define SLOTS 8192

// A fault counts operations from 1 since fakecuda_reset; 0 is none.
static struct setting {
  const char *name;
  long long value, initial;
} settings[] = {
    {"INIT", 0, 0},                         // the code that cuInit returns
    {"DEVICES", 1, 1},
    {"MEMORY", 1 << 30, 1 << 30},           // bytes of each device
    {"PIN_LIMIT", 1ll << 40, 1ll << 40},    // bytes that can be pinned in all
    {"LAZY", 0, 0},                         // 1: a copy is executed only when somebody waits for it or what follows it
    {"BANDWIDTH", 0, 0},                    // bytes per second of each stream; 0: as fast as it goes
    {"NO_BYTES", 0, 0},                     // 1: copies move nothing, as a copy engine takes no time of a processor
    {"FAIL_ALLOC", 0, 0},
    {"FAIL_PIN", 0, 0},
    {"FAIL_COPY", 0, 0},                    // of the copies to a device
    {"FAIL_AT", 0, 0},                      // who reports it: 0 the call, 1 its event, 2 only a synchronised stream
    {"FLIP_COPY", 0, 0},                    // a bit is wrong after this copy to a device
    {"FAIL_READ", 0, 0},                    // of the copies from a device, reported as FAIL_AT says
    {"FAIL_IPC", 0, 0},
    {"FAIL_VMM", 0, 0},                     // of the calls of vmm.c that take something or ask for something
    {"NO_VMM", 0, 0},                       // 1: the devices have no virtual memory management
    {"NO_FD", 0, 0},                        // 1: nor file descriptors for it
    {"NO_READ_ONLY", 0, 0},                 // 1: access is for reading and writing or not at all
    {"GRANULARITY", 2 << 20, 2 << 20},      // of memory that is created apart from its address
    {"HANG", 0, 0},                         // 1: no copy ends, until it is 0 again
    {"ALLOCS", 0, 0}, {"PINS", 0, 0}, {"COPIES", 0, 0}, {"HANDLES", 0, 0}, {"READS", 0, 0},
    {"VMM", 0, 0},                          // calls, until here
    {"UNPINNED", 0, 0},                     // copies from or to memory that was not pinned
    {"USED", 0, 0}, {"PINNED", 0, 0}, {"CONTEXTS", 0, 0}, {"STREAMS", 0, 0}, {"EVENTS", 0, 0},
    {"RANGES", 0, 0}, {"PHYSICAL", 0, 0},   // held now: reserved addresses, memory created or imported
};

enum setting_name {
  INIT, DEVICES, MEMORY, PIN_LIMIT, LAZY, BANDWIDTH, NO_BYTES, FAIL_ALLOC, FAIL_PIN, FAIL_COPY, FAIL_AT, FLIP_COPY, FAIL_READ,
  FAIL_IPC, FAIL_VMM, NO_VMM, NO_FD, NO_READ_ONLY, GRANULARITY, HANG, ALLOCS, PINS, COPIES, HANDLES, READS, VMM,
  UNPINNED, USED, PINNED, CONTEXTS, STREAMS, EVENTS, RANGES, PHYSICAL, SETTINGS
};

struct context {
  int device, refs, error;
};

struct alloc {
  struct context *ctx; // null: the slot is free
  char *host;
  uint64_t dptr;
  size_t size;
  int fd, imported;
};

struct event;

struct op { // a copy, or an event where event is set
  struct op *next;
  struct event *event;
  uint64_t to_device; // 0: the copy goes to the host
  uint64_t from_device;
  char *host;
  size_t size;
  long long number; // of the copies in its direction
};

struct stream {
  struct context *ctx;
  pthread_t thread;
  struct op *first, **last;
  long long queued, wanted, executed;
  int ending;
};

struct event {
  struct context *ctx;
  struct stream *stream;
  long long at;
  int error;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int initialized;
static struct context contexts[MAX_DEVICES];
static struct alloc allocs[SLOTS];
static struct { struct context *ctx; char *at; size_t size; } pins[SLOTS];
static __thread struct context *current;

#define N(name) (settings[name].value)

static void settle_physical(void);

long long fakecuda_get(const char *name) {
  pthread_mutex_lock(&mu);
  settle_physical();
  long long v = -1;
  for (int i = 0; i < SETTINGS; i++)
    if (!strcmp(settings[i].name, name)) v = N(i);
  pthread_mutex_unlock(&mu);
  return v;
}

int fakecuda_set(const char *name, long long value) {
  int found = 0;
  pthread_mutex_lock(&mu);
  for (int i = 0; i < USED; i++)
    if (!strcmp(settings[i].name, name)) N(i) = value, found = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mu);
  return found;
}

// fakecuda_reset brings back all settings as they were at first, and counts from 0 again. What is held stays held.
void fakecuda_reset(void) {
  pthread_mutex_lock(&mu);
  for (int i = 0; i < USED; i++) N(i) = settings[i].initial;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mu);
}

static struct context *enter(int *error) {
  pthread_mutex_lock(&mu);
  *error = !initialized ? NOT_INITIALIZED : !current || !current->refs ? INVALID_CONTEXT : OK;
  return current;
}

static int leave(int error) {
  pthread_mutex_unlock(&mu);
  return error;
}

int cuInit(unsigned flags) {
  pthread_mutex_lock(&mu);
  for (int i = 0; !initialized && i < USED; i++) {
    char name[64];
    snprintf(name, sizeof name, "FAKECUDA_%s", settings[i].name);
    if (getenv(name)) N(i) = settings[i].initial = atoll(getenv(name));
  }
  if (flags || N(INIT)) return leave(flags ? INVALID : N(INIT));
  if (N(DEVICES) <= 0) return leave(NO_DEVICE);
  initialized = 1;
  return leave(OK);
}

int cuDriverGetVersion(int *v) {
  *v = 12080;
  return OK;
}

int cuDeviceGetCount(int *n) {
  if (!initialized) return NOT_INITIALIZED;
  *n = (int)(N(DEVICES) < MAX_DEVICES ? N(DEVICES) : MAX_DEVICES);
  return OK;
}

static int device_ok(int d) {
  int n;
  return cuDeviceGetCount(&n) ? NOT_INITIALIZED : d < 0 || d >= n ? INVALID_DEVICE : OK;
}

int cuDeviceGet(int *d, int index) {
  *d = index;
  return device_ok(index);
}

int cuDeviceGetName(char *name, int size, int d) {
  snprintf(name, size, "Fake Accelerator");
  return device_ok(d);
}

int cuDeviceGetPCIBusId(char *id, int size, int d) {
  snprintf(id, size, "0000:%02x:00.0", 0x3b + d);
  return device_ok(d);
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int d) {
  for (int i = 0; i < 16; i++) uuid[i] = i * 17;
  uuid[15] = d;
  return device_ok(d);
}

int cuDevicePrimaryCtxRetain(void **ctx, int d) {
  int e = device_ok(d);
  if (e) return e;
  pthread_mutex_lock(&mu);
  contexts[d].device = d;
  if (!contexts[d].refs++) N(CONTEXTS)++;
  *ctx = &contexts[d];
  return leave(OK);
}

#include "vmm.c"

static void release_alloc(struct alloc *a) {
  munmap(a->host, a->size);
  if (a->fd >= 0) close(a->fd);
  if (!a->imported) N(USED) -= a->size;
  a->ctx = 0;
}

static void release_pin(int i) {
  N(PINNED) -= pins[i].size;
  pins[i].at = 0;
}

int cuDevicePrimaryCtxRelease_v2(int d) {
  int e = device_ok(d);
  if (e) return e;
  pthread_mutex_lock(&mu);
  if (!contexts[d].refs) return leave(INVALID_CONTEXT);
  if (!--contexts[d].refs) { // the context ends, and with it all that it holds
    contexts[d].error = 0;
    N(CONTEXTS)--;
    for (int i = 0; i < SLOTS; i++)
      if (allocs[i].ctx == &contexts[d]) release_alloc(&allocs[i]);
    for (int i = 0; i < SLOTS; i++)
      if (pins[i].at && pins[i].ctx == &contexts[d]) release_pin(i);
  }
  return leave(OK);
}

int cuCtxSetCurrent(void *ctx) {
  current = ctx;
  return initialized ? OK : NOT_INITIALIZED;
}

int cuCtxGetCurrent(void **ctx) {
  *ctx = current;
  return initialized ? OK : NOT_INITIALIZED;
}

// cuCtxSynchronize gives the error of the context only: whoever has streams here waits for them one by one.
int cuCtxSynchronize(void) {
  int e;
  struct context *c = enter(&e);
  return leave(e ? e : c->error);
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
  int e;
  struct context *c = enter(&e);
  if (e || c->error) return leave(e ? e : c->error);
  settle_physical();
  size_t used = physical_on(c->device);
  for (int i = 0; i < SLOTS; i++)
    if (allocs[i].ctx == c && !allocs[i].imported) used += allocs[i].size;
  *total = N(MEMORY);
  *free = used < *total ? *total - used : 0;
  return leave(OK);
}

static struct alloc *map(struct context *c, int fd, size_t size) {
  for (int i = 0; i < SLOTS; i++) {
    struct alloc *a = &allocs[i];
    if (a->ctx) continue;
    a->host = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (a->host == MAP_FAILED) return 0;
    a->ctx = c, a->size = size, a->fd = -1, a->imported = 0;
    a->dptr = (uint64_t)(uintptr_t)a->host | DEVICE_BIT;
    return a;
  }
  return 0;
}

// find returns the allocation that holds size bytes from dptr on.
static struct alloc *find(struct context *c, uint64_t dptr, size_t size) {
  for (int i = 0; i < SLOTS; i++) {
    struct alloc *a = &allocs[i];
    if (a->ctx == c && dptr >= a->dptr && dptr - a->dptr <= a->size && size <= a->size - (dptr - a->dptr)) return a;
  }
  return 0;
}

int cuMemAlloc_v2(uint64_t *dptr, size_t size) {
  size_t free, total;
  int e = cuMemGetInfo_v2(&free, &total);
  if (e) return e;
  struct context *c = enter(&e);
  if (!size) return leave(INVALID);
  if (++N(ALLOCS) == N(FAIL_ALLOC) || size > free) return leave(OUT_OF_MEMORY);
  int fd = memfd_create("fakecuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return leave(OUT_OF_MEMORY);
  struct alloc *a = map(c, fd, size);
  if (!a) return leave(OUT_OF_MEMORY);
  a->fd = fd;
  N(USED) += size;
  *dptr = a->dptr;
  return leave(OK);
}

int cuMemFree_v2(uint64_t dptr) {
  int e;
  struct context *c = enter(&e);
  if (e || c->error) return leave(e ? e : c->error);
  struct alloc *a = find(c, dptr, 0);
  if (!a || a->dptr != dptr || a->imported) return leave(INVALID);
  release_alloc(a);
  return leave(OK);
}

int cuMemHostRegister_v2(char *p, size_t size, unsigned flags) {
  int e, slot = -1;
  struct context *c = enter(&e);
  if (e || c->error) return leave(e ? e : c->error);
  if (!p || !size || flags & ~1u) return leave(INVALID);
  if (++N(PINS) == N(FAIL_PIN) || N(PINNED) + (long long)size > N(PIN_LIMIT)) return leave(OUT_OF_MEMORY);
  for (int i = SLOTS - 1; i >= 0; i--) {
    if (!pins[i].at) slot = i;
    else if (p < pins[i].at + pins[i].size && pins[i].at < p + size) return leave(ALREADY_REGISTERED);
  }
  if (slot < 0) return leave(OUT_OF_MEMORY);
  pins[slot].ctx = c, pins[slot].at = p, pins[slot].size = size;
  N(PINNED) += size;
  return leave(OK);
}

int cuMemHostUnregister(char *p) {
  int e;
  struct context *c = enter(&e);
  if (e || c->error) return leave(e ? e : c->error);
  for (int i = 0; p && i < SLOTS; i++)
    if (pins[i].at == p) {
      release_pin(i);
      return leave(OK);
    }
  return leave(NOT_REGISTERED);
}

static int pinned(const char *p, size_t size) {
  for (int i = 0; i < SLOTS; i++)
    if (pins[i].at && p >= pins[i].at && p + size <= pins[i].at + pins[i].size) return 1;
  return 0;
}

// execute makes a copy, with mu unlocked while bytes move. Memory that is gone by now makes the context useless.
static void execute(struct stream *s, struct op *o) {
  uint64_t dptr = o->to_device ? o->to_device : o->from_device;
  if (N(BANDWIDTH)) {
    long long rate = N(BANDWIDTH);
    pthread_mutex_unlock(&mu);
    usleep((useconds_t)(o->size * 1000000 / rate));
    pthread_mutex_lock(&mu);
  }
  if (o->number == N(o->to_device ? FAIL_COPY : FAIL_READ) && N(FAIL_AT)) s->ctx->error = ILLEGAL_ADDRESS;
  if (!find(s->ctx, dptr, o->size) && !accessible(s->ctx->device, dptr, o->size, o->to_device != 0))
    s->ctx->error = ILLEGAL_ADDRESS;
  if (s->ctx->error) return;
  char *device = (char *)(uintptr_t)(dptr & ~DEVICE_BIT);
  int flip = o->to_device && o->number == N(FLIP_COPY);
  if (N(NO_BYTES)) return;
  pthread_mutex_unlock(&mu);
  memcpy(o->to_device ? device : o->host, o->to_device ? o->host : device, o->size);
  if (flip) device[o->size / 2] ^= 1;
  pthread_mutex_lock(&mu);
}

static void *work(void *arg) {
  struct stream *s = arg;
  pthread_mutex_lock(&mu);
  for (;;) {
    if (!s->first && s->ending) break;
    if (!s->first || (N(HANG) && !s->first->event) || (N(LAZY) && !s->ending && s->executed >= s->wanted)) {
      pthread_cond_wait(&changed, &mu);
      continue;
    }
    struct op *o = s->first;
    if (!o->event) execute(s, o);
    else if (N(FAIL_AT) != 2) o->event->error = s->ctx->error;
    if (!(s->first = o->next)) s->last = &s->first;
    free(o);
    s->executed++;
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&mu);
  return 0;
}

static int usable(struct stream *s) { // what a call finds: an error that only a synchronised stream reports is not seen
  return !s || s->ctx != current ? INVALID_HANDLE : N(FAIL_AT) != 2 && s->ctx->error ? s->ctx->error : OK;
}

static void queue(struct stream *s, struct op o) {
  struct op *p = malloc(sizeof o);
  *p = o;
  p->next = 0;
  *s->last = p;
  s->last = &p->next;
  s->queued++;
  pthread_cond_broadcast(&changed);
}

static void settle(struct stream *s, long long at) {
  if (s->wanted < at) s->wanted = at;
  pthread_cond_broadcast(&changed);
  while (s->executed < at) pthread_cond_wait(&changed, &mu);
}

int cuStreamCreate(struct stream **out, unsigned flags) {
  int e;
  struct context *c = enter(&e);
  if (e || flags & ~1u) return leave(e ? e : INVALID);
  struct stream *s = calloc(1, sizeof *s);
  s->ctx = c;
  s->last = &s->first;
  if (pthread_create(&s->thread, 0, work, s)) return leave(OUT_OF_MEMORY);
  N(STREAMS)++;
  *out = s;
  return leave(OK);
}

int cuStreamSynchronize(struct stream *s) {
  int e;
  enter(&e);
  if (e || !s || s->ctx != current) return leave(e ? e : INVALID_HANDLE);
  settle(s, s->queued);
  return leave(s->ctx->error);
}

int cuStreamDestroy_v2(struct stream *s) {
  int e;
  enter(&e);
  if (e || !s || s->ctx != current) return leave(e ? e : INVALID_HANDLE);
  s->ending = 1;
  pthread_cond_broadcast(&changed);
  leave(OK);
  pthread_join(s->thread, 0);
  pthread_mutex_lock(&mu);
  free(s);
  N(STREAMS)--;
  return leave(OK);
}

static int copy(struct stream *s, struct op o) {
  int e;
  struct context *c = enter(&e);
  if (e || (e = usable(s))) return leave(e);
  uint64_t dptr = o.to_device ? o.to_device : o.from_device;
  if (!find(c, dptr, o.size) && !reserved(dptr, o.size)) return leave(INVALID);
  o.number = ++N(o.to_device ? COPIES : READS);
  if (o.number == N(o.to_device ? FAIL_COPY : FAIL_READ) && !N(FAIL_AT)) return leave(c->error = ILLEGAL_ADDRESS);
  queue(s, o);
  if (!pinned(o.host, o.size)) {
    N(UNPINNED)++;
    settle(s, s->queued);
  }
  return leave(OK);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, char *from, size_t size, struct stream *s) {
  return to ? copy(s, (struct op){.to_device = to, .host = from, .size = size}) : INVALID;
}

int cuMemcpyDtoHAsync_v2(char *to, uint64_t from, size_t size, struct stream *s) {
  return copy(s, (struct op){.from_device = from, .host = to, .size = size});
}

int cuEventCreate(struct event **out, unsigned flags) {
  int e;
  struct context *c = enter(&e);
  if (e || flags & ~7u) return leave(e ? e : INVALID);
  struct event *v = calloc(1, sizeof *v);
  v->ctx = c;
  N(EVENTS)++;
  *out = v;
  return leave(OK);
}

int cuEventRecord(struct event *v, struct stream *s) {
  int e;
  struct context *c = enter(&e);
  if (e || (e = usable(s))) return leave(e);
  if (!v || v->ctx != c) return leave(INVALID_HANDLE);
  v->error = OK;
  queue(s, (struct op){.event = v});
  v->stream = s;
  v->at = s->queued;
  return leave(OK);
}

int cuEventSynchronize(struct event *v) {
  int e;
  struct context *c = enter(&e);
  if (e || !v || v->ctx != c) return leave(e ? e : INVALID_HANDLE);
  if (v->stream) settle(v->stream, v->at);
  return leave(v->error);
}

int cuEventDestroy_v2(struct event *v) {
  int e;
  struct context *c = enter(&e);
  if (e || !v || v->ctx != c) return leave(e ? e : INVALID_HANDLE);
  free(v);
  N(EVENTS)--;
  return leave(OK);
}

// A handle is text: the process, its file and the size of the allocation.
int cuIpcGetMemHandle(char handle[64], uint64_t dptr) {
  int e;
  struct context *c = enter(&e);
  if (e || c->error) return leave(e ? e : c->error);
  struct alloc *a = find(c, dptr, 1);
  if (!a || a->imported) return leave(INVALID);
  if (++N(HANDLES) == N(FAIL_IPC)) return leave(OUT_OF_MEMORY);
  memset(handle, 0, 64);
  snprintf(handle, 64, "fakecuda %d %d %d %zu", getpid(), a->fd, c->device, a->size);
  return leave(OK);
}

struct handle {
  char text[64];
};

int cuIpcOpenMemHandle_v2(uint64_t *dptr, struct handle h, unsigned flags) {
  int e, pid, fd, device;
  size_t size;
  char path[64];
  struct context *c = enter(&e);
  if (e) return leave(e);
  h.text[63] = 0;
  if (flags != 1 || sscanf(h.text, "fakecuda %d %d %d %zu", &pid, &fd, &device, &size) != 4 || device != c->device)
    return leave(INVALID);
  if (pid == getpid()) return leave(INVALID_CONTEXT);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  FILE *f = fopen(path, "r+");
  if (!f) return leave(INVALID_HANDLE);
  struct alloc *a = map(c, fileno(f), size);
  fclose(f);
  if (!a) return leave(OUT_OF_MEMORY);
  a->imported = 1;
  *dptr = a->dptr;
  return leave(OK);
}

int cuIpcCloseMemHandle(uint64_t dptr) {
  int e;
  struct context *c = enter(&e);
  if (e) return leave(e);
  struct alloc *a = find(c, dptr, 0);
  if (!a || a->dptr != dptr || !a->imported) return leave(INVALID);
  release_alloc(a);
  return leave(OK);
}

static const struct { int code; const char *name, *text; } errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already registered"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory is not registered"},
};

static int explain(int code, const char **out, int text) {
  *out = 0;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) *out = text ? errors[i].text : errors[i].name;
  return *out ? OK : INVALID;
}

int cuGetErrorName(int code, const char **out) { return explain(code, out, 0); }

int cuGetErrorString(int code, const char **out) { return explain(code, out, 1); }
