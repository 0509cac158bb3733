//go:build !linux || !(amd64 || arm64) || nogpu

package cuda

import (
	"fmt"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Target is never made by this build.
type Target struct {
	gpuload.Target
	gpuload.Pinner
	gpuload.Reader
}

// Open returns ErrNone.
func Open(...int) (*Target, error) { return nil, errLeftOut() }

// OpenShared returns ErrNone.
func OpenShared(string, ...int) (*Target, error) { return nil, errLeftOut() }

// Imported is never made by this build.
type Imported struct{}

// Import returns ErrNone.
func Import(string, gpuload.Handle) (*Imported, error) { return nil, errLeftOut() }

// ReadOnly is never called.
func (*Imported) ReadOnly() bool { return true }

// ReadAt is never called.
func (*Imported) ReadAt([]byte, int64) (int, error) { return 0, errLeftOut() }

// Close is never called.
func (*Imported) Close() error { return nil }

func errLeftOut() error { return fmt.Errorf("%w: CUDA was left out of this build", ErrNone) }
