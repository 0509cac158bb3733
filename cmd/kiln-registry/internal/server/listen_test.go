package server

import (
	"net"
	"testing"
)

func TestLoopback(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1:1": true, "127.8.9.10:1": true, "localhost:1": true,
		"[::1]:1": true, ":1": false,
		"0.0.0.0:1": false, "[::]:1": false, "10.0.0.1:1": false, "example.com:1": false, "127.0.0.1": false,
		"localhost.example.com:1": false} {
		if isLoopback(addr) != want {
			t.Errorf("%s: want %v", addr, want)
		}
	}
}

func TestShownAddress(t *testing.T) {
	wild := &net.TCPAddr{IP: net.IPv6zero, Port: 5000}
	for given, want := range map[string]string{"0.0.0.0:0": "0.0.0.0:5000", "localhost:5000": "localhost:5000",
		"[::1]:0": "[::1]:5000", ":5000": "[::]:5000"} {
		if got := shown(given, wild); got != want {
			t.Errorf("%s: got %s, want %s", given, got, want)
		}
	}
}
