package report

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// Machine is where a table was measured.
type Machine struct {
	Cores  int    `json:"cores"`
	CPU    string `json:"cpu"`
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	TCP    string `json:"tcp"` // congestion control
}

// ThisMachine describes the machine that it runs on. What cannot be read is "unknown".
func ThisMachine() Machine {
	m := Machine{Cores: runtime.NumCPU(), CPU: "unknown", Kernel: "unknown", Go: runtime.Version()}
	text, _ := os.ReadFile("/proc/cpuinfo") // unknown, then
	if _, rest, ok := strings.Cut(string(text), "model name"); ok {
		line, _, _ := strings.Cut(rest, "\n")
		m.CPU = strings.Trim(line, "\t: ")
	}
	m.TCP = "unknown"
	if tcp, err := os.ReadFile(rig.CongestionControl); err == nil {
		m.TCP = strings.TrimSpace(string(tcp))
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return m
}

// Load returns the three load averages.
func Load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

// BusyLimit is the share of the processor time from which on the machine counts as busy with other work.
const BusyLimit = 0.1

// Busy returns the share of the processor time of all cores that was used while it waited for span: 1 if that cannot
// be told.
func Busy(span time.Duration) float64 {
	idle, total := times()
	time.Sleep(span)
	idle2, total2 := times()
	if total2 <= total {
		return 1
	}
	return 1 - (idle2-idle)/(total2-total)
}

// times returns the ticks of all cores so far: those in which they had nothing to do, and all.
func times() (idle, total float64) {
	text, _ := os.ReadFile("/proc/stat") // no ticks, then
	line, _, _ := bytes.Cut(text, []byte("\n"))
	for i, field := range strings.Fields(string(line)) {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil || i > 8 { // the name of the line; guests, which user time has too
			continue
		}
		if total += n; i == 4 || i == 5 { // idle, and waiting for a disk
			idle += n
		}
	}
	return idle, total
}
