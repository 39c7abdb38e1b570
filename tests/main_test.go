package tests

import (
	"testing"

	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestMain(m *testing.M) { testdb.Main(m) }
