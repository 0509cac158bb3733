package hostmem

import (
	"fmt"
	"os"
	"testing"
	"testing/fstest"
)

func TestAvailable(t *testing.T) {
	const gib = 1 << 30
	meminfo := "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"
	for name, tt := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"no groups": {nil, 8 * gib},
		"v2, limit of a parent": {map[string]string{
			"proc/self/cgroup":                   "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max":       "max\n",
			"sys/fs/cgroup/a/b/memory.current":   "1\n",
			"sys/fs/cgroup/a/memory.max":         fmt.Sprintln(4 * gib),
			"sys/fs/cgroup/a/memory.current":     fmt.Sprintln(3 * gib),
			"sys/fs/cgroup/a/memory.stat":        fmt.Sprintf("anon 5\ninactive_file %d\n", 2*gib),
			"sys/fs/cgroup/other/memory.max":     "1\n",
			"sys/fs/cgroup/other/memory.current": "1\n",
		}, 3 * gib},
		"v1 in a container": {map[string]string{
			"proc/self/cgroup":                           "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": fmt.Sprintln(2 * gib),
			"sys/fs/cgroup/memory/memory.usage_in_bytes": fmt.Sprintln(gib),
			"sys/fs/cgroup/memory/memory.stat":           fmt.Sprintf("inactive_file 7\ntotal_inactive_file %d\n", gib/2),
		}, gib + gib/2},
		"over its limit": {map[string]string{
			"proc/self/cgroup":             "0::/\n",
			"sys/fs/cgroup/memory.max":     "10\n",
			"sys/fs/cgroup/memory.current": "20\n",
		}, 0},
		"odd lines": {map[string]string{"proc/self/cgroup": "junk\n\n1:memory\n"}, 8 * gib},
	} {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}}
		for path, text := range tt.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got, err := available(root); err != nil || got != tt.want {
			t.Errorf("%s: %d, %v; want %d", name, got, err, tt.want)
		}
	}
	for _, text := range []string{"", "MemAvailable: x kB\n"} {
		if got, err := available(fstest.MapFS{"proc/meminfo": {Data: []byte(text)}}); err == nil {
			t.Errorf("meminfo %q gave %d", text, got)
		}
	}
	if got, err := available(os.DirFS("/")); err != nil || got <= 0 {
		t.Errorf("this machine: %d, %v", got, err)
	}
}
