package s3store

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/tests3"
)

// stall is the time without progress after which these tests take a request for lost.
const stall = 300 * time.Millisecond

var impatient = Options{limits: bucket.Options{Stall: stall, Assembly: stall}}

// classes are the requests that the work makes, each of which meets every fault.
var classes = map[string]tests3.Match{
	"marker put": markerPut, "marker get": markerGet, "bytes put": bytesPut, "bytes gone": bytesGone,
	"state put": statePut, "state get": stateGet, "state gone": stateGone,
	"tail put": tailPut, "tail get": tailGet, "tail gone": tailGone,
	"refs put": refsPut, "refs looked for": refsLooked,
	"begin": begin, "part put": partPut, "complete": complete, "abort": abort, "list": list, "multiparts": multiparts,
}

// TestFaults: whatever goes wrong with any kind of request, the clients get their work done, nothing is ever shown
// that is not right, and nothing is left behind.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		times int
		fault func() tests3.Fault
	}{
		"reset":                      {2, func() tests3.Fault { return reset }},
		"500, 503 and 429":           {3, overload},
		"409":                        {2, func() tests3.Fault { return tests3.Answer(409, "OperationAborted") }},
		"200 that is an error":       {2, func() tests3.Fault { return tests3.Answer(200, "InternalError") }},
		"done, then reset or 500":    {2, doneOnly},
		"body cut":                   {2, func() tests3.Fault { return tests3.CutRequest(100) }},
		"answer cut":                 {2, func() tests3.Fault { return tests3.CutAnswer(50) }},
		"body changed":               {2, func() tests3.Fault { return tests3.FlipRequest(40) }},
		"stall":                      {1, func() tests3.Fault { return tests3.Stall(tests3.NewGate()) }},
		"stall in the body":          {1, func() tests3.Fault { return tests3.StallRequest(20, tests3.NewGate()) }},
		"stall before the answer":    {1, stallBeforeAnswer},
		"stall in the answer's body": {1, func() tests3.Fault { return tests3.StallAnswer(20, tests3.NewGate()) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			w := newWork(s, s.open(impatient))
			rules := map[string]*tests3.Rule{}
			for class, match := range classes {
				if name == "200 that is an error" && class != "complete" {
					continue // only where a server may find out late
				}
				rules[class] = s.proxy.On(tests3.First(c.times, match), c.fault())
			}
			w.do()
			for class, r := range rules {
				if r.Hits() == 0 {
					t.Errorf("no request met the fault: %s", class)
				}
				r.Off()
			}
			w.check()
		})
	}
}

// overload answers as a server does that has too much to do, in one way after the other.
func overload() tests3.Fault {
	return inTurn(
		tests3.Answer(500, "InternalError"), tests3.Answer(503, "SlowDown"), tests3.Answer(429, "TooManyRequests"))
}

// doneOnly lets the server do what is asked, and drops its answer.
func doneOnly() tests3.Fault {
	return inTurn(tests3.Persisted(reset), tests3.Persisted(tests3.Answer(500, "InternalError")))
}

// inTurn breaks one request after the other in another way.
func inTurn(faults ...tests3.Fault) tests3.Fault {
	var n atomic.Int64
	return func(next http.Handler) http.Handler {
		return faults[int(n.Add(1)-1)%len(faults)](next)
	}
}

// stallBeforeAnswer lets the server do what is asked, and keeps its answer back.
func stallBeforeAnswer() tests3.Fault { return tests3.Persisted(tests3.Stall(tests3.NewGate())) }

// TestEveryThird: every third request of whatever kind is lost, or carried out without an answer.
func TestEveryThird(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]tests3.Fault{"lost": reset, "done": tests3.Persisted(reset)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			w := newWork(s, s.open(Options{Tries: 2}))
			n := 0
			rule := s.proxy.On(func(*http.Request) bool { n++; return n%3 == 0 }, fault)
			w.do()
			rule.Off()
			w.check()
		})
	}
}

// TestReaderGoesOn: a reader goes on where an answer broke off or stalled, and gives up when none brings anything.
func TestReaderGoesOn(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]tests3.Fault{
		"cut": tests3.CutAnswer(100_001), "stall": tests3.StallAnswer(100_001, tests3.NewGate()),
		"reset": reset, "500": tests3.Answer(500, "InternalError"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			b := noise(1, 300_000)
			_, err := s.push(s.past(), b, pushing{named: true})
			s.must(err)
			st := s.open(impatient)
			s.proxy.On(tests3.First(2, bytesGet), fault)
			s.holds(st, b)
			if n := s.proxy.Count(tests3.GetObject); n < 5 { // store.json, the marker, and three for the bytes
				t.Errorf("%d requests: the fault was not met", n)
			}

			i, err := st.Stat(s.ctx, identity.Sum(b))
			s.must(err)
			s.proxy.On(bytesGet, tests3.CutAnswer(0))
			before := s.proxy.Count(tests3.GetObject)
			_, err = readAll(s.ctx, st, i)
			s.want("read where nothing comes", err, blobstore.ErrUnavailable)
			if n := s.proxy.Count(tests3.GetObject) - before; n != bucket.Attempts {
				t.Errorf("%d requests where nothing came, want %d", n, bucket.Attempts)
			}
		})
	}
}
