// The part of the stand-in that keeps memory apart from its address, included by fakecuda.c. Memory is a file (memfd);
// it is used until its handles are released, its mappings are gone and the descriptors that were exported of it are
// closed in this process, and it exists until the same holds in all processes: that of its maker may end before.
// What is created or mapped does not end with a context. Addresses that are reserved but not mapped, or to which the
// device was given no access, are found by a copy only when it is executed: it makes the context useless.

struct location { int type, id; };

// CUmemAllocationProp and CUmemAccessDesc, as cuda.h lays them out.
struct prop {
  int type, handle_types;
  struct location location;
  void *win32;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};

struct access {
  struct location location;
  int flags;
};

_Static_assert(sizeof(struct prop) == 32 && offsetof(struct prop, handle_types) == 4, "CUmemAllocationProp");
_Static_assert(offsetof(struct prop, location) == 8 && offsetof(struct prop, win32) == 16, "CUmemAllocationProp");
_Static_assert(offsetof(struct prop, flags) == 24 && offsetof(struct prop, flags.usage) == 26, "CUmemAllocationProp");
_Static_assert(sizeof(struct access) == 12 && offsetof(struct access, flags) == 8, "CUmemAccessDesc");

#define EXPORTS 16

static struct physical {
  int open, fd, device, imported, exportable, handles, maps, exported[EXPORTS];
  size_t size;
} physical[SLOTS];

static struct range { // of addresses
  char *host;         // null: the slot is free
  size_t size;
  struct physical *mem;
  int access[MAX_DEVICES];
} ranges[SLOTS];

// same says whether a descriptor of this process is open and names the memory.
static int same(struct physical *m, int fd) {
  struct stat a, b;
  return fd >= 0 && !fstat(fd, &a) && !fstat(m->fd, &b) && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

// settle_physical frees the memory that nothing in this process refers to any more.
static void settle_physical(void) {
  for (int i = 0; i < SLOTS; i++) {
    struct physical *m = &physical[i];
    int held = m->handles || m->maps;
    for (int k = 0; m->open && k < EXPORTS; k++) held |= same(m, m->exported[k]);
    if (!m->open || held) continue;
    close(m->fd);
    m->open = 0;
    N(PHYSICAL)--;
    if (!m->imported) N(USED) -= m->size;
  }
}

static size_t physical_on(int device) {
  size_t n = 0;
  for (int i = 0; i < SLOTS; i++)
    if (physical[i].open && !physical[i].imported && physical[i].device == device) n += physical[i].size;
  return n;
}

static struct range *range_of(uint64_t dptr, size_t size) {
  char *host = (char *)(uintptr_t)(dptr & ~DEVICE_BIT);
  for (int i = 0; dptr & DEVICE_BIT && i < SLOTS; i++) {
    struct range *r = &ranges[i];
    if (r->host && host >= r->host && host + size <= r->host + r->size) return r;
  }
  return 0;
}

static int reserved(uint64_t dptr, size_t size) { return range_of(dptr, size) != 0; }

static int accessible(int device, uint64_t dptr, size_t size, int write) {
  struct range *r = range_of(dptr, size);
  return r && r->mem && r->access[device] & (write ? 2 : 1);
}

#ifndef WITHOUT_VMM

// begin counts a call that can be made to fail.
static int begin(void) {
  pthread_mutex_lock(&mu);
  return !initialized ? NOT_INITIALIZED : ++N(VMM) == N(FAIL_VMM) ? OUT_OF_MEMORY : N(NO_VMM) ? NOT_SUPPORTED : OK;
}

static int end(void) {
  pthread_mutex_lock(&mu);
  return initialized ? OK : NOT_INITIALIZED;
}

int cuDeviceGetAttribute(int *value, int attribute, int d) {
  int e = begin();
  if (e && e != NOT_SUPPORTED) return leave(e);
  if (attribute != 102 && attribute != 103) return leave(INVALID);
  *value = !N(NO_VMM) && (attribute == 102 || !N(NO_FD));
  return leave(d < 0 || d >= N(DEVICES) ? INVALID_DEVICE : OK);
}

static int prop_ok(const struct prop *p) {
  return p && p->type == 1 && !(p->handle_types & ~1) && p->location.type == 1 && p->location.id >= 0 &&
         p->location.id < N(DEVICES) && !p->win32 && !p->flags.compression && !p->flags.usage;
}

int cuMemGetAllocationGranularity(size_t *size, const struct prop *p, int option) {
  int e = begin();
  if (e || !prop_ok(p) || option & ~1) return leave(e ? e : INVALID);
  *size = N(GRANULARITY);
  return leave(OK);
}

static struct physical *physical_slot(int fd, size_t size, int device) {
  for (int i = 0; fd >= 0 && i < SLOTS; i++) {
    struct physical *m = &physical[i];
    if (m->open) continue;
    *m = (struct physical){.open = 1, .fd = fd, .size = size, .device = device, .handles = 1};
    memset(m->exported, -1, sizeof m->exported);
    N(PHYSICAL)++;
    return m;
  }
  return 0;
}

int cuMemCreate(uint64_t *handle, size_t size, const struct prop *p, unsigned long long flags) {
  char name[64];
  int e = begin();
  if (e || !prop_ok(p) || flags || !size || size % N(GRANULARITY)) return leave(e ? e : INVALID);
  settle_physical();
  size_t used = physical_on(p->location.id);
  for (int i = 0; i < SLOTS; i++)
    if (allocs[i].ctx == &contexts[p->location.id] && !allocs[i].imported) used += allocs[i].size;
  if (used + size > (size_t)N(MEMORY)) return leave(OUT_OF_MEMORY);
  snprintf(name, sizeof name, "fakecuda-vmm-%d", p->location.id);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return leave(OUT_OF_MEMORY);
  struct physical *m = physical_slot(fd, size, p->location.id);
  if (!m) return leave(OUT_OF_MEMORY);
  m->exportable = p->handle_types;
  N(USED) += size;
  *handle = m - physical + 1;
  return leave(OK);
}

static struct physical *physical_of(uint64_t handle) {
  if (!handle || handle > SLOTS || !physical[handle - 1].open || !physical[handle - 1].handles) return 0;
  return &physical[handle - 1];
}

int cuMemRelease(uint64_t handle) {
  int e = end();
  struct physical *m = physical_of(handle);
  if (e || !m) return leave(e ? e : INVALID);
  m->handles--;
  settle_physical();
  return leave(OK);
}

int cuMemAddressReserve(uint64_t *dptr, size_t size, size_t align, uint64_t at, unsigned long long flags) {
  int e = begin();
  if (e || !size || size % N(GRANULARITY) || flags || at || align) return leave(e ? e : INVALID);
  for (int i = 0; i < SLOTS; i++) {
    struct range *r = &ranges[i];
    if (r->host) continue;
    char *host = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (host == MAP_FAILED) break;
    *r = (struct range){.host = host, .size = size};
    N(RANGES)++;
    *dptr = (uint64_t)(uintptr_t)host | DEVICE_BIT;
    return leave(OK);
  }
  return leave(OUT_OF_MEMORY);
}

// whole returns the range that starts at dptr and has this size.
static struct range *whole(uint64_t dptr, size_t size) {
  struct range *r = range_of(dptr, size);
  return r && ((uint64_t)(uintptr_t)r->host | DEVICE_BIT) == dptr && r->size == size ? r : 0;
}

int cuMemAddressFree(uint64_t dptr, size_t size) {
  int e = end();
  struct range *r = whole(dptr, size);
  if (e || !r || r->mem) return leave(e ? e : INVALID);
  munmap(r->host, r->size);
  r->host = 0;
  N(RANGES)--;
  return leave(OK);
}

int cuMemMap(uint64_t dptr, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
  int e = begin();
  struct range *r = whole(dptr, size);
  struct physical *m = physical_of(handle);
  if (e || !r || r->mem || !m || offset || flags || size > m->size) return leave(e ? e : INVALID);
  if (mmap(r->host, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->fd, 0) == MAP_FAILED)
    return leave(OUT_OF_MEMORY);
  r->mem = m;
  m->maps++;
  return leave(OK);
}

int cuMemUnmap(uint64_t dptr, size_t size) {
  int e = end();
  struct range *r = whole(dptr, size);
  if (e || !r || !r->mem) return leave(e ? e : INVALID);
  mmap(r->host, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  r->mem->maps--;
  r->mem = 0;
  memset(r->access, 0, sizeof r->access);
  settle_physical();
  return leave(OK);
}

int cuMemSetAccess(uint64_t dptr, size_t size, const struct access *a, size_t count) {
  int e = begin();
  struct range *r = whole(dptr, size);
  if (e || !r || !r->mem || count != 1 || a->location.type != 1 || a->location.id < 0 || a->location.id >= N(DEVICES))
    return leave(e ? e : INVALID);
  if (a->flags != 0 && a->flags != 3 && (a->flags != 1 || N(NO_READ_ONLY))) return leave(INVALID);
  r->access[a->location.id] = a->flags;
  return leave(OK);
}

// The descriptor is inherited by programs that this one executes, as long as nobody sets FD_CLOEXEC.
int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags) {
  int e = begin(), slot = 0;
  struct physical *m = physical_of(handle);
  if (e || !m || !m->exportable || type != 1 || flags) return leave(e ? e : INVALID);
  while (slot < EXPORTS && same(m, m->exported[slot])) slot++;
  if (slot == EXPORTS || (*fd = dup(m->fd)) < 0) return leave(OUT_OF_MEMORY);
  m->exported[slot] = *fd;
  return leave(OK);
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *shareable, int type) {
  int e = begin(), device, fd = (int)(intptr_t)shareable;
  char path[64], name[128] = "";
  struct stat st;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (e || type != 1 || readlink(path, name, sizeof name - 1) < 0 || fstat(fd, &st) ||
      sscanf(name, "/memfd:fakecuda-vmm-%d", &device) != 1)
    return leave(e ? e : INVALID);
  struct physical *m = physical_slot(fcntl(fd, F_DUPFD_CLOEXEC, 0), st.st_size, device);
  if (!m) return leave(OUT_OF_MEMORY);
  m->imported = 1;
  *handle = m - physical + 1;
  return leave(OK);
}

#endif
