package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
)

// code is a CUresult.
type code int32

// driver is a second, plain binding of the driver library: what gpuload/cuda does is measured against it, and it asks
// for what that package has no use for. All calls are made on one thread with the primary context current.
type driver struct {
	lib    uintptr
	device int32

	init       func(flags uint32) code
	version    func(v *int32) code
	count      func(n *int32) code
	get        func(d *int32, index int32) code
	name       func(name []byte, size, d int32) code
	uuid       func(uuid []byte, d int32) code
	attribute  func(v *int32, attribute, d int32) code
	retain     func(ctx *uintptr, d int32) code
	release    func(d int32) code
	setCurrent func(ctx uintptr) code
	memory     func(free, total *uint64) code
	alloc      func(p *uint64, n uint64) code
	free       func(p uint64) code
	pin        func(b []byte, n uint64, flags uint32) code
	unpin      func(b []byte) code
	toDevice   func(to uint64, from []byte, n uint64, stream uintptr) code
	toHost     func(to []byte, from, n uint64, stream uintptr) code
	newStream  func(s *uintptr, flags uint32) code
	sync       func(s uintptr) code
	endStream  func(s uintptr) code
	export     func(handle []byte, p uint64) code
	errorName  func(c code, text **byte) code
	errorText  func(c code, text **byte) code

	context uintptr
	stream  uintptr
}

// openDriver binds the library, makes the primary context of the device current on this thread, and a stream in it.
func openDriver(device int) (*driver, error) {
	d := &driver{device: int32(device)}
	var err error
	for _, name := range []string{cmp.Or(os.Getenv(cuda.EnvLibrary), "libcuda.so.1"), "libcuda.so"} {
		d.lib, err = purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
		if err == nil || os.Getenv(cuda.EnvLibrary) != "" {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	for name, fn := range map[string]any{
		"cuInit": &d.init, "cuDriverGetVersion": &d.version, "cuDeviceGetCount": &d.count, "cuDeviceGet": &d.get,
		"cuDeviceGetName": &d.name, "cuDeviceGetUuid_v2": &d.uuid, "cuDeviceGetAttribute": &d.attribute,
		"cuDevicePrimaryCtxRetain": &d.retain, "cuDevicePrimaryCtxRelease_v2": &d.release,
		"cuCtxSetCurrent": &d.setCurrent, "cuMemGetInfo_v2": &d.memory, "cuMemAlloc_v2": &d.alloc,
		"cuMemFree_v2": &d.free, "cuMemHostRegister_v2": &d.pin, "cuMemHostUnregister": &d.unpin,
		"cuMemcpyHtoDAsync_v2": &d.toDevice, "cuMemcpyDtoHAsync_v2": &d.toHost, "cuStreamCreate": &d.newStream,
		"cuStreamSynchronize": &d.sync, "cuStreamDestroy_v2": &d.endStream, "cuIpcGetMemHandle": &d.export,
		"cuGetErrorName": &d.errorName, "cuGetErrorString": &d.errorText,
	} {
		at, err := purego.Dlsym(d.lib, name)
		if err != nil {
			return nil, fmt.Errorf("the driver library has no %s", name)
		}
		purego.RegisterFunc(fn, at)
	}
	if err := d.check("cuInit", d.init(0)); err != nil {
		return nil, err
	}
	return d, d.enter()
}

func (d *driver) enter() error {
	var index int32
	return errors.Join(
		d.check("cuDeviceGet", d.get(&index, d.device)),
		d.check("cuDevicePrimaryCtxRetain", d.retain(&d.context, d.device)),
		d.check("cuCtxSetCurrent", d.setCurrent(d.context)),
		d.check("cuStreamCreate", d.newStream(&d.stream, 1)),
	)
}

// close gives back what openDriver took.
func (d *driver) close() error {
	return errors.Join(
		d.check("cuCtxSetCurrent", d.setCurrent(d.context)),
		d.check("cuStreamDestroy", d.endStream(d.stream)),
		d.check("cuDevicePrimaryCtxRelease", d.release(d.device)),
	)
}

// check makes an error of a code that is not 0.
func (d *driver) check(call string, c code) error {
	if c == 0 {
		return nil
	}
	return &cuda.Error{Call: call, Code: int(c), Name: d.text(d.errorName, c), Text: d.text(d.errorText, c)}
}

func (d *driver) text(ask func(code, **byte) code, c code) string {
	var at *byte
	if ask(c, &at) != 0 || at == nil {
		return ""
	}
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(at), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(at, n))
}

// used returns the bytes of the device that are not free.
func (d *driver) used() (uint64, error) {
	var free, total uint64
	err := d.check("cuMemGetInfo", d.memory(&free, &total))
	return total - free, err
}

// uuidText returns the UUID as gpuload/cuda writes it.
func (d *driver) uuidText() (string, error) {
	u := make([]byte, 16)
	err := d.check("cuDeviceGetUuid", d.uuid(u, d.device))
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), err
}

// hostMemory returns n bytes outside the collector's memory, written once. They live as long as the process.
func hostMemory(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = byte(i >> 12)
	}
	return b, nil
}
