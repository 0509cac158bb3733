//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"github.com/ebitengine/purego"
)

// table holds the entry points of a driver library. Another driver of this shape fills it by other names.
type table struct {
	errorName, errorText                              uintptr
	initialize, deviceCount, device                   uintptr
	deviceName, deviceUUID, devicePCI                 uintptr
	retain, release, setCurrent                       uintptr
	memInfo, alloc, free                              uintptr
	pin, unpin                                        uintptr
	copyToDevice, copyToHost                          uintptr
	streamCreate, streamSync, streamDestroy           uintptr
	eventCreate, eventRecord, eventSync, eventDestroy uintptr
	exportHandle, openHandle, closeHandle             uintptr
	vmm                                               vmmTable
}

// entry says under which names a library has an entry point, the preferred one first.
type entry struct {
	at       *uintptr
	optional bool
	names    []string
}

// cuda lists the names of NVIDIA's driver.
func (t *table) cuda() []entry {
	need := func(at *uintptr, names ...string) entry { return entry{at, false, names} }
	entries := []entry{
		need(&t.errorName, "cuGetErrorName"), need(&t.errorText, "cuGetErrorString"),
		need(&t.initialize, "cuInit"), need(&t.deviceCount, "cuDeviceGetCount"), need(&t.device, "cuDeviceGet"),
		need(&t.deviceName, "cuDeviceGetName"), need(&t.deviceUUID, "cuDeviceGetUuid_v2", "cuDeviceGetUuid"),
		{&t.devicePCI, true, []string{"cuDeviceGetPCIBusId"}},
		need(&t.retain, "cuDevicePrimaryCtxRetain"), need(&t.release, "cuDevicePrimaryCtxRelease_v2"),
		need(&t.setCurrent, "cuCtxSetCurrent"),
		need(&t.memInfo, "cuMemGetInfo_v2"), need(&t.alloc, "cuMemAlloc_v2"), need(&t.free, "cuMemFree_v2"),
		need(&t.pin, "cuMemHostRegister_v2"), need(&t.unpin, "cuMemHostUnregister"),
		need(&t.copyToDevice, "cuMemcpyHtoDAsync_v2"), need(&t.copyToHost, "cuMemcpyDtoHAsync_v2"),
		need(&t.streamCreate, "cuStreamCreate"), need(&t.streamSync, "cuStreamSynchronize"),
		need(&t.streamDestroy, "cuStreamDestroy_v2"),
		need(&t.eventCreate, "cuEventCreate"), need(&t.eventRecord, "cuEventRecord"),
		need(&t.eventSync, "cuEventSynchronize"), need(&t.eventDestroy, "cuEventDestroy_v2"),
		need(&t.exportHandle, "cuIpcGetMemHandle"), need(&t.openHandle, "cuIpcOpenMemHandle_v2"),
		need(&t.closeHandle, "cuIpcCloseMemHandle"),
	}
	return append(entries, t.vmm.entries()...)
}

// fillTable looks up the entries in a loaded library.
func fillTable(lib uintptr, entries []entry) error {
	for _, e := range entries {
		for _, name := range e.names {
			at, err := purego.Dlsym(lib, name)
			if err == nil {
				*e.at = at
				break
			}
		}
		if *e.at == 0 && !e.optional {
			return fmt.Errorf("the driver library has no %s: it is too old", e.names[0])
		}
	}
	return nil
}

// loaded are the libraries that were loaded and started, by name. None is ever unloaded.
var loaded = struct {
	sync.Mutex
	tables map[string]*table
}{tables: map[string]*table{}}

// load loads and starts the driver.
func load() (*table, error) {
	names, err := libraries(os.Getenv(EnvLibrary), os.Getuid() != os.Geteuid() || os.Getgid() != os.Getegid())
	if err != nil {
		return nil, err
	}
	loaded.Lock()
	defer loaded.Unlock()
	if t := loaded.tables[names[0]]; t != nil {
		return t, nil
	}
	lib, err := openLibrary(names)
	if err != nil {
		return nil, err
	}
	t := new(table)
	if err := fillTable(lib, t.cuda()); err != nil {
		return nil, err
	}
	if err := t.call("cuInit", t.initialize, 0); err != nil {
		var e *Error
		if errors.As(err, &e) && e.Code == noDevice {
			return nil, fmt.Errorf("%w: %w", ErrNone, err)
		}
		return nil, fmt.Errorf("start the CUDA driver: %w", err)
	}
	loaded.tables[names[0]] = t
	return t, nil
}

// libraries returns the names to try. raised says that the program runs with the rights of another user.
func libraries(override string, raised bool) ([]string, error) {
	switch {
	case override == "":
		return []string{"libcuda.so.1", "libcuda.so"}, nil
	case raised:
		return nil, fmt.Errorf("%s is set in a program that runs with the rights of another user", EnvLibrary)
	}
	return []string{override}, nil
}

// openLibrary opens the first of the names that it can, and fails with the error of the first. The C library keeps the
// reason for the thread that met it.
func openLibrary(names []string) (lib uintptr, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var first error
	for _, name := range names {
		if lib, err = purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL); err == nil {
			return lib, nil
		}
		if first == nil {
			first = err
		}
	}
	if first == nil || first.Error() == "" {
		first = fmt.Errorf("%s can't be loaded", names[0])
	}
	return 0, fmt.Errorf("%w: %w", ErrNone, first)
}
