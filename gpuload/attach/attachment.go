package attach

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

// events is how many events wait for whoever reads them. Of more the oldest go.
const events = 16

// Attachment is a base or an adapter that this process uses, and the lease of it. Its methods are safe for concurrent
// use.
type Attachment struct {
	Document Document
	Blocks   []Block // in the order of shard and then of device; shards without data have none

	conn   *stream
	events chan Event
	ended  chan struct{} // closed when the lease has ended
	close  func() error
}

// Block is the data of one shard on one device.
type Block struct {
	Shard  int            // index in the document's shards
	Device Device         // that has it
	Data   []byte         // of host memory: mapped for reading; nil for that of a device
	Handle gpuload.Handle // of a device's memory: to be opened with the package of that device
	Offset int64          // of the data in the memory of Handle
}

// Attach asks for a base by its aggregate, on the client's socket. The context ends the attempt, not the attachment.
// Errors are those of Do, and ErrDocument.
func (c Client) Attach(ctx context.Context, a identity.Aggregate) (*Attachment, error) {
	return c.Of(a).attach(ctx, Path(a), func(text []byte) (Document, error) { return wanted(text, a, identity.Digest{}) })
}

// AttachAdapter asks for an adapter that is loaded on a base, by the digest of its manifest; else it is Attach.
func (c Client) AttachAdapter(ctx context.Context, a identity.Aggregate, d identity.Digest) (*Attachment, error) {
	return c.Of(a).attach(ctx, PathAdapter(a, d), func(text []byte) (Document, error) { return wanted(text, a, d) })
}

// wanted parses the document of a base, or of an adapter on it where d is not zero.
func wanted(text []byte, a identity.Aggregate, d identity.Digest) (Document, error) {
	doc, err := Parse(text)
	switch {
	case err != nil:
		return doc, err
	case doc.Aggregate != a:
		return doc, fmt.Errorf("%w %s: it is of %s", ErrDocument, a, doc.Aggregate)
	case d.IsZero() != (doc.Adapter == nil), doc.Adapter != nil && doc.Adapter.Digest != d:
		return doc, fmt.Errorf("%w: it is of another adapter than %s, or of none", ErrDocument, d)
	}
	return doc, nil
}

func (c Client) attach(ctx context.Context, path string, parse func([]byte) (Document, error)) (*Attachment, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	s := newStream(conn)
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	a, err := c.open(s, path, parse)
	if !stop() && err == nil {
		err = errors.New("the attempt was broken off")
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("attach on %s: %w", c.Socket, errors.Join(err, a.unmap(), s.Close()))
	}
	go a.watch()
	return a, nil
}

// open makes the connection a stream, and reads from it the document and all descriptors.
func (c Client) open(s *stream, path string, parse func([]byte) (Document, error)) (*Attachment, error) {
	a := &Attachment{conn: s, events: make(chan Event, events), ended: make(chan struct{})}
	a.close = sync.OnceValue(a.end)
	if err := s.upgrade(path); err != nil {
		return a, err
	}
	text, err := s.line(MaxDocument)
	if err != nil {
		return a, err
	}
	if a.Document, err = parse(text); err != nil {
		return a, err
	}
	if a.Document.Lease == nil {
		return a, fmt.Errorf("%w: no lease", ErrDocument)
	}
	return a, a.receive()
}

// receive asks for the descriptors and opens a block as soon as its own is there.
func (a *Attachment) receive() error {
	total := 0
	_ = a.Document.places(func(_, _ int, ipc **IPC) error {
		if (*ipc).Descriptor != nil {
			total++
		}
		return nil
	})
	asked := 0
	return a.Document.places(func(shard, device int, ipc **IPC) error {
		p, data := *ipc, a.Document.Shards[shard].Data
		b := Block{Shard: shard, Offset: p.Offset}
		b.Device, _ = a.Document.device(device)
		b.Handle = gpuload.Handle{Kind: p.Kind, Shard: shard, Device: device, Size: p.Offset + data, Raw: p.Handle,
			Allocation: p.Allocation}
		if p.Descriptor != nil {
			if *p.Descriptor == asked {
				n := min(MaxDescriptors, total-asked)
				if err := a.conn.ask(asked, n, a.note); err != nil {
					return err
				}
				asked += n
			}
			b.Handle.File = a.conn.take()
		}
		if p.Kind == KindFile {
			file := b.Handle.File
			b.Handle = gpuload.Handle{}
			var err error
			b.Data, err = mapSealed(file, p.Offset, data)
			if err = errors.Join(err, file.Close()); err != nil {
				return fmt.Errorf("shard %s: %w", a.Document.Shards[shard].Name, err)
			}
		}
		a.Blocks = append(a.Blocks, b)
		return nil
	})
}

// note keeps an event until somebody reads it.
func (a *Attachment) note(e Event) {
	for {
		select {
		case a.events <- e:
			return
		default:
		}
		select {
		case <-a.events:
		default:
		}
	}
}

// watch reads events until the connection ends.
func (a *Attachment) watch() {
	defer close(a.ended)
	defer close(a.events)
	for {
		text, err := a.conn.line(maxLine)
		if err != nil {
			return
		}
		var l Line
		if json.Unmarshal(text, &l) != nil {
			return
		}
		if l.Kind != "" {
			a.note(l.Event)
		}
	}
}

// Events gives what the holder tells. It is closed when the lease has ended: at Close, or when the holder has gone.
// Nobody has to read it: the oldest events go.
func (a *Attachment) Events() <-chan Event { return a.events }

// Bytes returns the bytes of a tensor in host memory, and nil for one that has none or is on a device. They are read
// only, and gone after Close.
func (a *Attachment) Bytes(t gpuload.Tensor) []byte {
	for _, b := range a.Blocks {
		if b.Shard == t.Shard && b.Data != nil {
			return b.Data[t.Offset : t.Offset+t.NBytes : t.Offset+t.NBytes]
		}
	}
	return nil
}

// Close ends the lease and unmaps host memory: nobody may use Data or an opened handle from then on. A second Close
// does nothing more.
func (a *Attachment) Close() error { return a.close() }

func (a *Attachment) end() error {
	err := a.conn.conn.Close()
	<-a.ended
	return errors.Join(err, a.conn.drop(), a.unmap())
}

// unmap gives back what the blocks have.
func (a *Attachment) unmap() (err error) {
	for _, b := range a.Blocks {
		if b.Handle.File != nil {
			err = errors.Join(err, b.Handle.File.Close())
		}
		err = errors.Join(err, unmap(b.Data))
	}
	return err
}

// stream is a connection after the upgrade.
type stream struct {
	*descriptors
	r *bufio.Reader
}

// maxLine is how long a line after the document may be, in bytes.
const maxLine = 64 << 10

func (s *stream) upgrade(path string) error {
	_, sent := fmt.Fprintf(s.conn, "GET %s HTTP/1.1\r\nHost: resident\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", path,
		Protocol)
	resp, err := http.ReadResponse(s.r, &http.Request{Method: http.MethodGet})
	if err != nil {
		return cmp.Or(sent, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxLine))
		if err != nil {
			return err
		}
		return refused(resp.StatusCode, text)
	}
	return nil
}

// line reads a line of at most so many bytes. It is the caller's.
func (s *stream) line(most int) (text []byte, err error) {
	for {
		part, err := s.r.ReadSlice('\n')
		text = append(text, part...)
		switch {
		case len(text) > most:
			return nil, fmt.Errorf("the holder sent a line of more than %d bytes", most)
		case err == nil:
			return text, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}

// ask asks for n descriptors and waits for the line that they come with. Events that come before it are noted.
func (s *stream) ask(first, n int, note func(Event)) error {
	want := Descriptors{first, n}
	text, err := json.Marshal(Line{Descriptors: &want})
	if err != nil {
		return err
	}
	_, sent := s.conn.Write(append(text, '\n')) // a holder that hangs up has said why
	for {
		var l Line
		if text, err = s.line(maxLine); err == nil {
			err = json.Unmarshal(text, &l)
		}
		switch {
		case err != nil:
			return cmp.Or(sent, err)
		case l.Code != "":
			return &Error{l.Error, l.Code}
		case l.Descriptors == nil:
			note(l.Event)
		case *l.Descriptors != want || len(s.files) != n:
			return fmt.Errorf("asked for descriptors %d+%d and got %d+%d with %d", first, n, l.Descriptors.First,
				l.Descriptors.Count, len(s.files))
		default:
			return nil
		}
	}
}

// Close closes the connection and the descriptors that nobody took. Nobody may read meanwhile.
func (s *stream) Close() error { return errors.Join(s.conn.Close(), s.drop()) }

func (s *stream) drop() (err error) {
	for _, f := range s.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// take returns the next descriptor.
func (s *stream) take() *os.File {
	f := s.files[0]
	s.files = s.files[1:]
	return f
}
