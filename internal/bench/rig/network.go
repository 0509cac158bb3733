package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// network is set in the environment of the programs that a run starts: unset in the one that has the namespace, and
// settled in all others.
const network, unset, settled = "KILN_BENCH_NETWORK", "unset", "settled"

// CongestionControl says how TCP decides when it sends, for the connections of this network namespace.
const CongestionControl = "/proc/sys/net/ipv4/tcp_congestion_control"

// Apart runs this program once more, in a network namespace of its own that has loopback and nothing else, and returns
// true with what came of it. There a sender does not pace itself: many machines have bbr, which sends from a timer, and
// on loopback that is charged to whoever has the core, mostly the receiver that is being measured. It returns false in
// the program that it ran, and where there is no such namespace to be had: then the network is the machine's.
func Apart(ctx context.Context) (bool, error) {
	state := os.Getenv(network)
	os.Setenv(network, settled)
	switch state {
	case settled:
		return false, nil
	case unset:
		return false, errors.Join(loopback(), os.WriteFile(CongestionControl, []byte("cubic"), 0))
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Env = append(os.Environ(), network+"="+unset)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if id := os.Geteuid(); id != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: id, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "no network of its own:", err)
		return false, nil
	}
	return true, cmd.Wait()
}

// loopback sets the interface up that a new namespace has.
func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}
