// Package api holds what travels between a Kiln registry and its clients: wire types, error codes and the path of every
// route. The wire types are the domain types; there is no second set.
package api
