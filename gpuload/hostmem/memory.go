package hostmem

import (
	"bufio"
	"bytes"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
)

// available returns the bytes that this process can still take: what the kernel says is available, or less where a
// control group it is in allows less. root is the root of the file system.
func available(root fs.FS) (int64, error) {
	info, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, err
	}
	kb, ok := field(info, "MemAvailable:")
	if !ok {
		return 0, fmt.Errorf("proc/meminfo has no MemAvailable")
	}
	free := kb << 10
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return free, nil // a kernel without control groups
	}
	for line := range strings.Lines(string(groups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(parts) != 3:
		case parts[0] == "0":
			free = min(free, groupRoom(root, "sys/fs/cgroup", parts[2], v2))
		case strings.Contains(","+parts[1]+",", ",memory,"):
			free = min(free, groupRoom(root, "sys/fs/cgroup/memory", parts[2], v1))
		}
	}
	return max(0, free), nil
}

// version names the files in which a control group says how much it may use, uses, and could give back at once.
type version struct{ limit, usage, cache string }

var (
	v1 = version{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}
	v2 = version{"memory.max", "memory.current", "inactive_file"}
)

// groupRoom returns what the group and all above it leave, and MaxInt64 where none of them has a limit. Inside a
// container the path may name groups that are not shown there; the mount itself is then the container's group.
func groupRoom(root fs.FS, mount, group string, v version) int64 {
	room := int64(math.MaxInt64)
	for group = path.Clean("/" + group); ; group = path.Dir(group) {
		dir := path.Join(mount, group)
		limit, ok1 := number(root, path.Join(dir, v.limit))
		usage, ok2 := number(root, path.Join(dir, v.usage))
		if ok1 && ok2 {
			stat, _ := fs.ReadFile(root, path.Join(dir, "memory.stat"))
			cache, _ := field(stat, v.cache)
			room = min(room, limit-max(0, usage-cache))
		}
		if group == "/" {
			return room
		}
	}
}

// number reads a file that holds one number; "max" is none.
func number(root fs.FS, name string) (int64, bool) {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}

// field returns the number that follows name at the start of a line.
func field(text []byte, name string) (int64, bool) {
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if f := strings.Fields(lines.Text()); len(f) >= 2 && f[0] == name {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
