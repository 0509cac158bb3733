package fetch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// MismatchError: the bytes of a file do not hash to the digest that the artifact states.
type MismatchError struct {
	Name      string
	Size      int64
	Want, Got identity.Digest
}

// Error names the file, its size and both digests.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("%s: digest mismatch: want %s, got %s (%d bytes)", e.Name, e.Want, e.Got, e.Size)
}

// Is makes it a client.ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == client.ErrMismatch }

// Error says which files of an artifact were not received. The others are kept, verified, for the next try.
type Error struct {
	Failed []FailedFile
	Total  int // files of the artifact
}

// FailedFile is a file that was not received.
type FailedFile struct {
	Name string
	Err  error
}

// maxNamed bounds the files that an Error names.
const maxNamed = 5

// Error names the files with their reasons.
func (e *Error) Error() string {
	s := fmt.Sprintf("%d of %d files not received: ", len(e.Failed), e.Total)
	var text []string
	for i, f := range e.Failed {
		if i == maxNamed {
			text = append(text, fmt.Sprintf("and %d more", len(e.Failed)-i))
			break
		}
		text = append(text, f.Name+": "+strings.TrimPrefix(f.Err.Error(), f.Name+": "))
	}
	return s + strings.Join(text, "; ")
}

// Unwrap returns the reasons.
func (e *Error) Unwrap() (errs []error) {
	for _, f := range e.Failed {
		errs = append(errs, f.Err)
	}
	return errs
}

// errGaveUp: the file was not tried, or not to the end, as the server or the disk failed for another one.
var errGaveUp = errors.New("gave up after the failure of another file")

// diskError is one of this machine: no source is to blame for it.
type diskError struct{ error }

func (e diskError) Unwrap() error { return e.error }

func ours(err error) error {
	if err == nil {
		return nil
	}
	return diskError{err}
}

// isOurs says whether nobody else is to blame for err: it is of this machine, or the caller ended the work.
func isOurs(ctx context.Context, err error) bool {
	var d diskError
	return ctx.Err() != nil || errors.As(err, &d)
}

// rank puts what went wrong before what was only not tried.
func rank(err error) int {
	if errors.Is(err, errGaveUp) {
		return 1
	}
	return 0
}

// meetsAll says whether an error is not about one file: the server failed after all tries, access is denied, the disk
// does not take any more, the area is lost.
func meetsAll(err error) bool {
	var no syscall.Errno
	return denied(err) || client.Temporary(err) || errors.Is(err, staging.ErrLost) || errors.As(err, &no)
}

func denied(err error) bool { return status(err, http.StatusUnauthorized, http.StatusForbidden) }

// overload says whether a server answered that it is asked too much.
func overload(err error) bool {
	return status(err, http.StatusTooManyRequests, http.StatusServiceUnavailable)
}

func status(err error, codes ...int) bool {
	var s *client.StatusError
	if !errors.As(err, &s) {
		return false
	}
	for _, c := range codes {
		if s.Status == c {
			return true
		}
	}
	return false
}

func asked(err error) time.Duration {
	var s *client.StatusError
	if errors.As(err, &s) {
		return s.RetryAfter
	}
	return 0
}
