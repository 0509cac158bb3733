package rig

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// TestTurns: every side has its turn in each round, the first one changes, and round 0 does not count.
func TestTurns(t *testing.T) {
	var order []string
	side := func(name string, cost float64) Side {
		return Side{name, func(round int) (Cost, error) {
			order = append(order, name)
			return Cost{CPU: cost * float64(round)}, nil
		}}
	}
	rs, err := Turns(3, side("a", 1), side("b", 2))
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Fields("a b b a a b b a"); !slices.Equal(order, want) {
		t.Errorf("order %v, want %v", order, want)
	}
	if s := rs.CPU("a"); s != (Spread{2, 1, 3}) {
		t.Errorf("a: %v", s)
	}
	if s := rs.CPURatio("b", "a"); s != (Spread{2, 2, 2}) {
		t.Errorf("ratio: %v", s)
	}
	broken := errors.New("broken")
	if _, err := Turns(1, Side{"c", func(int) (Cost, error) { return Cost{}, broken }}); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

// TestRun: the processor time is that of the process that was named.
func TestRun(t *testing.T) {
	c, err := Run(t.Context(), "sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo $i")
	if err != nil || c.Said != "20000\n" || c.CPU <= 0 || c.Wall <= 0 {
		t.Errorf("%+v, %v", c, err)
	}
	_, err = Run(t.Context(), "sh", "-c", "echo why >&2; exit 3")
	if err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("error %v", err)
	}
}

// TestMeter: it counts what went each way, and starts anew when it was asked.
func TestMeter(t *testing.T) {
	const size = 1 << 20
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Write(make([]byte, size))
	}))
	defer s.Close()
	m, err := NewMeter(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := NewClient()
	defer c.CloseIdleConnections()
	if _, err := c.Do(t.Context(), "PUT", m.URL, Stream(1, 1000), 1000, http.StatusOK); err != nil {
		t.Fatal(err)
	}
	sent, received := m.Take()
	if sent < 1000 || sent > 2000 || received < size || received > size+1000 {
		t.Errorf("sent %d, received %d", sent, received)
	}
	if sent, received := m.Take(); sent != 0 || received != 0 {
		t.Errorf("again: sent %d, received %d", sent, received)
	}
}
