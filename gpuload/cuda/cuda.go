// Package cuda is the target that holds weights in the memory of NVIDIA devices. It binds the driver library when it is
// used, without cgo: a program that imports it runs on machines that have no such library, and is linked to glibc.
//
// The build tag nogpu leaves the binding out, as do systems that it was not written for; Open then says so.
package cuda

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Backend is the name of this target in listings.
const Backend = "cuda"

// The kinds of the handles of this target. Another process opens them on the device with the same UUID. What it then
// writes there is seen by all.
const (
	// KindIPC: 64 bytes for cuIpcOpenMemHandle, in a process of this host that shares the PID namespace.
	KindIPC = "cuda-ipc"
	// KindVMM: a file descriptor for cuMemImportFromShareableHandle, in a process of this host that was sent it. The
	// memory stays while anybody has it mapped or its descriptor open, also when the process that made it has ended.
	KindVMM = "vmm-fd"
)

// EnvLibrary names the driver library, for tests. It is an error in a program that runs with the rights of another
// user.
const EnvLibrary = "KILN_CUDA_LIB"

// ErrNone: there is no driver library, it finds no device, or this build has no binding.
var ErrNone = errors.New("no CUDA device")

// Codes of the driver (CUresult).
const (
	outOfMemory = 2
	noDevice    = 100
)

// lost are the codes after which nothing that the process has on the device can be used: cuda.h says that it must be
// ended to go on. 214 is an error in memory that could not be corrected, 220 one of a link; the others are of a kernel.
var lost = []int{214, 220, 700, 702, 714, 715, 716, 717, 718, 719}

// Error is what a call of the driver returned. It is gpuload.ErrMemory when the driver says that memory ran out, and
// gpuload.ErrUnreadable when what the process has on the device is lost to it.
type Error struct {
	Call string // of the driver
	Code int    // CUresult
	Name string // of the code, empty if the driver has none
	Text string // for people, empty if the driver has none
}

// Error names the call, the code and what the driver says about it.
func (e *Error) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("%s: error %d", e.Call, e.Code)
	}
	return fmt.Sprintf("%s: %s (%s, %d)", e.Call, e.Text, e.Name, e.Code)
}

// Is implements errors.Is for gpuload.ErrMemory and gpuload.ErrUnreadable.
func (e *Error) Is(target error) bool {
	return target == gpuload.ErrMemory && e.Code == outOfMemory ||
		target == gpuload.ErrUnreadable && slices.Contains(lost, e.Code)
}
