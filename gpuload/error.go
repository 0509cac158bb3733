package gpuload

import (
	"errors"
	"fmt"
)

// The reasons that a caller tells apart with errors.Is.
var (
	ErrMismatch = errors.New("the bytes are not those asked for")  // a digest, a size, a name or the aggregate
	ErrChanged  = errors.New("the file changed while it was read") // also: it ended early or grew
	ErrMemory   = errors.New("not enough memory")                  // before the first byte was copied
	ErrDevice   = errors.New("the device failed")                  // allocation, copy or publication
	ErrState    = errors.New("the weights are not published")      // no longer, or not yet
)

// Error says where a load failed. Err wraps one of the reasons above where one applies.
type Error struct {
	Shard    string // file name
	Offset   int64  // where in the file it was noticed: the end of the file for a digest
	Expected string
	Got      string
	Err      error
}

// Error names the shard, the offset and, where there are such, what was expected and what was found.
func (e *Error) Error() string {
	s := fmt.Sprintf("load shard %s, offset %d: %v", e.Shard, e.Offset, e.Err)
	if e.Expected != "" || e.Got != "" {
		s += fmt.Sprintf(": expected %s, got %s", e.Expected, e.Got)
	}
	return s
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

func deviceError(err error) error { return fmt.Errorf("%w: %w", ErrDevice, err) }
