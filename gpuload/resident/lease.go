package resident

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/internal/localsock"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// Limits on a stream.
const (
	lineTimeout = 30 * time.Second      // for a line to be taken by the client
	fullTimeout = 2 * time.Second       // for others to take descriptors that are on their way, if those are too many
	fullPause   = 10 * time.Millisecond // between looks at whether descriptors were taken
	waiting     = 16                    // events that wait to be taken
)

// ErrLeased: the memory was freed although others were attached to it.
var ErrLeased = errors.New("leases were left")

// leases are the attachments that are open.
type leases struct {
	mu     sync.Mutex
	open   map[*stream]struct{}
	closed bool
	ended  sync.WaitGroup
}

// add is false when no more are taken.
func (l *leases) add(s *stream) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if l.open == nil {
		l.open = map[*stream]struct{}{}
	}
	l.open[s] = struct{}{}
	l.ended.Add(1)
	return true
}

func (l *leases) remove(s *stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, s)
	l.ended.Done()
}

func (l *leases) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}

// tell sends an event to all. Who does not take it loses the lease.
func (l *leases) tell(e attach.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := range l.open {
		select {
		case s.events <- e:
		default:
			s.conn.Close()
		}
	}
}

// refuse takes no more leases.
func (l *leases) refuse() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// drain waits until all have ended, and cuts off those that are left when ctx ends: their memory is about to go. It
// returns how many those were.
func (l *leases) drain(ctx context.Context) int {
	if l.count() == 0 {
		return 0
	}
	ended := make(chan struct{})
	go func() {
		l.ended.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return 0
	case <-ctx.Done():
	}
	l.mu.Lock()
	n := len(l.open)
	for s := range l.open {
		s.conn.Close()
	}
	l.mu.Unlock()
	<-ended
	return n
}

// cutOff is ErrLeased for some leases.
type cutOff struct {
	leases int
	after  time.Duration
}

// Error gives one line.
func (e *cutOff) Error() string {
	what := "1 lease was"
	if e.leases != 1 {
		what = fmt.Sprintf("%d leases were", e.leases)
	}
	return fmt.Sprintf("drain: %s cut off after %s", what, e.after)
}

// Is implements errors.Is for ErrLeased.
func (e *cutOff) Is(target error) bool { return target == ErrLeased }

// stream is one attachment.
type stream struct {
	conn   *connection
	r      *bufio.Reader
	files  []*os.File
	asked  []bool // of each descriptor: it was sent
	events chan attach.Event

	mu       sync.Mutex // of writing
	patience time.Duration
}

// upgrades says whether a request asks for an attach.
func upgrades(r *http.Request) bool {
	for _, v := range r.Header.Values("Connection") {
		for word := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(word), "upgrade") {
				return strings.EqualFold(r.Header.Get("Upgrade"), attach.Protocol)
			}
		}
	}
	return false
}

// attach answers with the document, or makes the connection a lease if that is what the request asks for.
func (s *Server) attach(w http.ResponseWriter, r *http.Request, a *attachable) error {
	generation := s.held.Load().generation()
	if r.Method != http.MethodGet || !upgrades(r) {
		d := a.document
		d.Generation = generation
		write(w, http.StatusOK, d)
		return nil
	}
	if e := s.damaged.Load(); e != nil {
		return e
	}
	if s.ending.Load() {
		return gpuload.ErrState
	}
	g, err := a.grant(generation)
	if err != nil {
		return err
	}
	defer g.release()
	return s.lease(w, r, g)
}

// lease serves one attachment to its end.
func (s *Server) lease(w http.ResponseWriter, r *http.Request, g *granted) error {
	text, err := json.Marshal(g.document)
	if err != nil {
		return err
	}
	c := r.Context().Value(peerKey{}).(peer).conn
	t := &stream{conn: c, files: g.files, asked: make([]bool, len(g.files)), events: make(chan attach.Event, waiting),
		patience: lineTimeout}
	if !s.leases.add(t) {
		return gpuload.ErrState
	}
	defer s.leases.remove(t)
	_, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer c.Close()
	t.r = buffered.Reader
	s.attaches.Add(1)
	var told sync.WaitGroup
	defer told.Wait()
	defer c.Close()
	gone := make(chan struct{})
	defer close(gone)
	if t.begin(text) != nil {
		return nil // the client has gone
	}
	told.Go(func() { t.tell(gone) })
	if e := t.serve(); e != nil {
		s.refused.add(e.Code)
		refusal, _ := json.Marshal(e)
		_ = t.line(refusal, nil) // for people: the connection ends in any case
	}
	return nil
}

func (t *stream) begin(document []byte) error {
	if err := t.conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	const head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + attach.Protocol + "\r\n\r\n"
	if err := t.write([]byte(head), nil); err != nil {
		return err
	}
	return t.line(document, nil)
}

// tell writes events until the client has gone.
func (t *stream) tell(gone <-chan struct{}) {
	for {
		select {
		case <-gone:
			return
		case e := <-t.events:
			text, err := json.Marshal(e)
			if err == nil {
				err = t.line(text, nil)
			}
			if err != nil {
				t.conn.Close() // which ends serve
				return
			}
		}
	}
}

// serve answers the client's lines until it goes, which is no error, or one is refused.
func (t *stream) serve() *attach.Error {
	for {
		text, err := t.r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return attach.Refuse(attach.CodeBadRequest, "the line is too long")
		}
		if err != nil {
			return nil
		}
		d, err := parseLine(text)
		if err == nil {
			err = t.mayHave(d)
		}
		if err != nil {
			return attach.Refuse(attach.CodeBadRequest, "%v", err)
		}
		answer, err := json.Marshal(attach.Line{Descriptors: &d})
		if err == nil {
			err = t.line(answer, t.files[d.First:d.First+d.Count])
		}
		if errors.Is(err, syscall.ETOOMANYREFS) {
			return attach.Refuse(attach.CodeBusy, "too many descriptors are on their way to others who do not take them")
		}
		if err != nil || !t.taken() {
			return nil
		}
	}
}

// mayHave says whether such descriptors are there, and notes that they were sent: each is once.
func (t *stream) mayHave(d attach.Descriptors) error {
	if d.Count < 1 || d.Count > attach.MaxDescriptors || d.First > len(t.files)-d.Count {
		return fmt.Errorf("descriptors %d+%d: there are %d, and %d go at a time", d.First, d.Count, len(t.files),
			attach.MaxDescriptors)
	}
	asked := t.asked[d.First : d.First+d.Count]
	if slices.Contains(asked, true) {
		return fmt.Errorf("descriptors %d+%d: each goes once", d.First, d.Count)
	}
	for i := range asked {
		asked[i] = true
	}
	return nil
}

// taken waits until the client has read all that was sent to it: what it leaves lying counts against all processes of
// this user. It is false when that takes too long.
func (t *stream) taken() bool {
	for end := time.Now().Add(t.patience); ; time.Sleep(fullPause) {
		left, err := localsock.Unread(t.conn)
		if err != nil || left > 0 && time.Now().After(end) {
			return false
		}
		if left == 0 {
			return true
		}
	}
}

// parseLine reads a line of the client.
func parseLine(text []byte) (d attach.Descriptors, err error) {
	err = strictjson.Read(text, func(r *strictjson.Reader) error {
		number := func(name string, to *int) strictjson.Field {
			return strictjson.Field{Name: name, Read: func() error {
				n, err := r.Uint32()
				*to = int(n)
				return err
			}}
		}
		return r.Struct(strictjson.Field{Name: "descriptors", Read: func() error {
			return r.Struct(number("first", &d.First), number("count", &d.Count))
		}})
	})
	return d, err
}

// line writes a line, and with it descriptors.
func (t *stream) line(text []byte, files []*os.File) error { return t.write(append(text, '\n'), files) }

func (t *stream) write(b []byte, files []*os.File) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.conn.SetWriteDeadline(time.Now().Add(t.patience)); err != nil {
		return err
	}
	if len(files) > 0 {
		n, err := t.send(b, files)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	_, err := t.conn.Write(b)
	return err
}

// send writes the start of b and the descriptors. The kernel bounds how many descriptors of a user are on their way.
func (t *stream) send(b []byte, files []*os.File) (n int, err error) {
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	rights := syscall.UnixRights(fds...)
	for end := time.Now().Add(min(t.patience, fullTimeout)); ; {
		n, _, err = t.conn.WriteMsgUnix(b, rights, nil)
		if !errors.Is(err, syscall.ETOOMANYREFS) || time.Now().After(end) {
			return n, err
		}
		time.Sleep(fullPause)
	}
}
