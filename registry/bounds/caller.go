package bounds

import (
	"context"
	"net/netip"
)

type callerKey struct{}

// WithCaller says to whom what is taken of budgets on behalf of ctx belongs.
func WithCaller(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, callerKey{}, name)
}

// Caller returns what WithCaller said; empty: nothing.
func Caller(ctx context.Context) string {
	name, _ := ctx.Value(callerKey{}).(string)
	return name
}

// Origin names who sends from an address, HOST:PORT, where nothing else tells callers apart: the address, of IPv6 the
// network of 64 bits, as one host may have all of that. The name begins with a zero byte, as no other one does.
func Origin(address string) string {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return "\x00" + address
	}
	host := at.Addr().Unmap().WithZone("")
	if host.Is4() {
		return "\x00" + host.String()
	}
	network, _ := host.Prefix(64) // every IPv6 address has one
	return "\x00" + network.String()
}
