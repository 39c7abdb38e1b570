package repository

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
)

// The settings that no session can change on a server of the tests. What a session can change is tested there.
func TestCheckJudgesSettings(t *testing.T) {
	t.Parallel()
	sound := settings{
		"default_transaction_isolation": "read committed", "default_transaction_read_only": "off", "fsync": "on",
		"full_page_writes": "on", "in_hot_standby": "off", "max_connections": "100", "max_locks_per_transaction": "64",
		"max_prepared_transactions": "0", "server_encoding": "UTF8", "server_version_num": "150000", "synchronous_commit": "on",
	}
	for _, test := range []struct {
		name, value string
		want        []Severity
	}{
		{"server_version_num", "150000", nil},
		{"server_version_num", "140013", []Severity{SeverityFailing}},
		{"server_version_num", "90600", []Severity{SeverityFailing}},
		{"in_hot_standby", "on", []Severity{SeverityFailing}},
		{"max_locks_per_transaction", "40", []Severity{SeverityFailing}},
		{"max_locks_per_transaction", "41", nil},
		{"max_connections", "64", nil},
		{"max_connections", "63", []Severity{SeverityFailing}},
		{"synchronous_commit", "local", nil},
		{"server_encoding", "SQL_ASCII", []Severity{SeverityFailing}},
	} {
		s := maps.Clone(sound)
		s[test.name] = test.value
		c := checker{hold: DefaultHoldTimeout}
		c.judge(s)
		var got []Severity
		for _, f := range c.findings {
			got = append(got, f.Severity)
			require.Contains(t, f.String(), f.Problem)
		}
		require.Equal(t, test.want, got, "%s = %s: %v", test.name, test.value, c.findings)
	}
}
