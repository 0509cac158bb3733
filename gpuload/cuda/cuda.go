// Package cuda is the target that holds weights in the memory of NVIDIA devices. It binds the driver library when it is
// used, without cgo: a program that imports it runs on machines that have no such library, and is linked to glibc.
//
// The build tag nogpu leaves the binding out, as do systems that it was not written for; Open then says so.
package cuda

import (
	"errors"
	"fmt"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Backend is the name of this target in listings.
const Backend = "cuda"

// KindIPC is the kind of the handles of this target: 64 bytes that another process of this host gives to
// cuIpcOpenMemHandle, on the device with the same UUID.
const KindIPC = "cuda-ipc"

// EnvLibrary names the driver library, for tests. It is an error in a program that runs with the rights of another
// user.
const EnvLibrary = "KILN_CUDA_LIB"

// ErrNone: there is no driver library, it finds no device, or this build has no binding.
var ErrNone = errors.New("no CUDA device")

// outOfMemory is CUDA_ERROR_OUT_OF_MEMORY.
const outOfMemory = 2

// Error is what a call of the driver returned. It is gpuload.ErrMemory when the driver says that memory ran out.
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

// Is implements errors.Is for gpuload.ErrMemory.
func (e *Error) Is(target error) bool { return target == gpuload.ErrMemory && e.Code == outOfMemory }
