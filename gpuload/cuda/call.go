//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"encoding/binary"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Flags of the driver's calls.
const (
	pinPortable       = 1     // pinned for every context
	streamNonBlocking = 1     // does not wait for work of others in the process
	eventFlags        = 1 | 2 // wait without spinning; no timing
	lazyPeerAccess    = 1
)

// call calls an entry point whose result is a code. Memory that an argument points to stays where it is until then.
//
//go:uintptrescapes
func (t *table) call(name string, fn uintptr, args ...uintptr) error {
	code, _, _ := purego.SyscallN(fn, args...)
	if uint32(code) == 0 {
		return nil
	}
	e := &Error{Call: name, Code: int(int32(code))}
	e.Name, e.Text = t.text(t.errorName, code), t.text(t.errorText, code)
	return e
}

// text asks the driver for a text about a code.
func (t *table) text(fn, code uintptr) string {
	var p *byte
	if r, _, _ := purego.SyscallN(fn, code, uintptr(unsafe.Pointer(&p))); uint32(r) != 0 || p == nil {
		return ""
	}
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

// out calls fn, which writes a value of T to where its first argument points.
func out[T any](t *table, name string, fn uintptr, a, b uintptr) (T, error) {
	v := new(T)
	err := t.call(name, fn, uintptr(unsafe.Pointer(v)), a, b)
	return *v, err
}

func (t *table) deviceText(name string, fn uintptr, device int32) (string, error) {
	var b [256]byte
	err := t.call(name, fn, uintptr(unsafe.Pointer(&b)), uintptr(len(b)), uintptr(device))
	return cString(b[:]), err
}

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// memory returns the bytes that are free on the current device.
func (t *table) memory() (free uint64, err error) {
	var total uint64
	err = t.call("cuMemGetInfo", t.memInfo, uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)))
	return free, err
}

// Bytes are handed over by where they start, converted in the call itself: that keeps them off the stack, which moves.

// toDevice starts a copy. src must stay as it is until the copy is done.
func (t *table) toDevice(dst uint64, src []byte, stream uintptr) error {
	return t.call("cuMemcpyHtoDAsync", t.copyToDevice, uintptr(dst), uintptr(unsafe.Pointer(unsafe.SliceData(src))),
		uintptr(len(src)), stream)
}

// toHost starts a copy. dst must not be used until the copy is done.
func (t *table) toHost(dst []byte, src uint64, stream uintptr) error {
	return t.call("cuMemcpyDtoHAsync", t.copyToHost, uintptr(unsafe.Pointer(unsafe.SliceData(dst))), uintptr(src),
		uintptr(len(dst)), stream)
}

// register pins b. It stays pinned until unregister is called with what register returned.
func (t *table) register(b []byte) (uintptr, error) {
	err := t.call("cuMemHostRegister", t.pin, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), pinPortable)
	return uintptr(unsafe.Pointer(unsafe.SliceData(b))), err
}

// handle is a CUipcMemHandle.
type handle [64]byte

// open opens a handle on the current device. The driver takes it by value: amd64 passes so large a structure on the
// stack, behind the six arguments that fill registers; arm64 passes the address of a copy.
func (t *table) open(h handle) (ptr uint64, err error) {
	const name = "cuIpcOpenMemHandle"
	if runtime.GOARCH == "arm64" {
		err = t.call(name, t.openHandle, uintptr(unsafe.Pointer(&ptr)), uintptr(unsafe.Pointer(&h)), lazyPeerAccess)
		return ptr, err
	}
	var w [8]uintptr
	for i := range w {
		w[i] = uintptr(binary.NativeEndian.Uint64(h[8*i:]))
	}
	err = t.call(name, t.openHandle, uintptr(unsafe.Pointer(&ptr)), lazyPeerAccess, 0, 0, 0, 0,
		w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
	return ptr, err
}
