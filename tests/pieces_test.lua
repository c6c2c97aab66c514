-- pieces_test - tensors put together from stored pieces: any part, from any other cut, and no piece
-- is read of which it has nothing; and files that are written part by part.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local pieces <const> = require "rille.pieces"

local ROWS <const>, COLUMNS <const> = 13, 6
local whole <const> = rille.arange(ROWS * COLUMNS):view(ROWS, COLUMNS):to("f32")

-- A cut as a plan has it, of each rank's runs.
local function cut_of(dim, size, ranks)
  return { dim = dim, size = size, full = dim == 0 and ROWS or COLUMNS,
    runs = function(rank) return ranks[rank + 1] end }
end

-- Row cuts: in order; two runs of which the second is shared; padded. A column cut.
local even <const> = cut_of(0, 5, { { { 0, 5, true } }, { { 5, 5, true } }, { { 10, 3, true } } })
local shared <const> = cut_of(0, 9, { { { 0, 4, true }, { 10, 3, true } },
  { { 4, 6, true }, { 10, 3, false } } })
local padded <const> = cut_of(0, 7, { { { 0, 7, true } }, { { 7, 6, true } } })
local columns <const> = cut_of(1, 2, { { { 0, 2, true } }, { { 2, 2, true } }, { { 4, 2, true } } })

local function part_of(cut, rank)
  local shape = { ROWS, COLUMNS }
  shape[cut.dim + 1] = cut.size
  local part = rille.zeros(shape)
  require "rille.tensor_parallel".take(cut, rank, whole, part)
  return part, shape
end

-- What a file of all ranks' pieces has: entries by name, and its metadata; cut nil: the whole.
local function stored_of(cut, n)
  local entries = {}
  for rank = 0, n - 1 do
    for _, piece in ipairs(pieces.of("w", cut and part_of(cut, rank) or whole, cut, rank)) do
      check.equal(entries[piece[1]], nil)
      entries[piece[1]] = piece[2]
    end
  end
  local file = {}
  function file:names()
    local names = {}
    for name in pairs(self and entries) do table.insert(names, name) end
    return names
  end
  function file:describe(name)
    local entry = self and entries[name]
    return entry:dtype(), { entry:shape() }
  end
  local cuts = cut and { w = { dim = cut.dim, shape = { ROWS, COLUMNS } } } or {}
  return pieces.stored("file", file, cuts).w, entries
end

local stores <const> = { { even, 3 }, { shared, 2 }, { padded, 2 }, { columns, 3 }, { nil, 1 } }

check.test("any part from any other cut, and the whole", function()
  for i = 1, 5 do
    local there, entries = stored_of(stores[i][1], stores[i][2])
    local function read(name) return entries[name] end
    check.equal(pieces.assemble(there, read, { ROWS, COLUMNS }), whole)
    for k = 1, 4 do
      for rank = 0, stores[k][2] - 1 do
        local want, shape = part_of(stores[k][1], rank)
        check.equal(pieces.assemble(there, read, shape, stores[k][1], rank), want)
      end
    end
  end
end)

check.test("only pieces of which the part has some are read, each once", function()
  local function reads(from, n, cut, rank)
    local there, entries = stored_of(from, n)
    local list, _, shape = {}, part_of(cut, rank)
    pieces.assemble(there, function(name)
      table.insert(list, name)
      return entries[name]
    end, shape, cut, rank)
    return list
  end
  check.equal(reads(even, 3, padded, 0), { "w#0", "w#5" })
  check.equal(reads(even, 3, padded, 1), { "w#5", "w#10" })
  check.equal(reads(even, 3, shared, 0), { "w#0", "w#10" })
  check.equal(reads(shared, 2, even, 1), { "w#4" })
  check.equal(reads(columns, 3, columns, 1), { "w#2" })
  check.equal(reads(nil, 1, shared, 0), { "w" })
end)

check.test("a file is written part by part; it appears whole or not at all", function()
  local core, path = rille.core, os.tmpname()
  os.remove(path)
  local specs = { { "a", "f32", { ROWS, COLUMNS } }, { "b", "f32", { ROWS, COLUMNS } },
    { "c", "i64", { 0, 3 } }, { "d", "bf16", {} } }
  local function write(more)
    local writer <close> = core.safetensors_writer(path, specs, { key = "value" })
    for rank = 0, 2 do
      writer:write(1, whole:slice(1, 2 * rank, 2 * rank + 2):contiguous(), 1, 2 * rank, COLUMNS)
    end
    writer:write(2, whole:slice(0, 4, ROWS), 0, 4, ROWS)
    writer:write(3, rille.zeros({ 0, 3 }, { dtype = "i64" }))
    writer:write(4, rille.full({}, 2, { dtype = "bf16" }))
    more(writer)
    writer:commit()
    check.raises(function() writer:commit() end, "is written or given up")
  end
  check.raises(function() write(function() end) end, "312 bytes of tensor \"b\", 216 were")
  for words, list in pairs { ["tensor 8 of 4"] = { { 9, whole } }, ["a part of the entry"] = {
    { 2, whole, 1, 3, COLUMNS }, { 2, whole, 7, 0, 1 }, { 2, whole:t(), 0, 0, COLUMNS } } } do
    for _, bad in ipairs(list) do
      check.raises(function() write(function(w) w:write(table.unpack(bad)) end) end, words)
    end
  end
  check.equal(core.stat(path), nil)
  write(function(writer) writer:write(2, whole:slice(0, 0, 4), 0, 0, ROWS) end)
  local tensors, metadata = rille.load(path)
  check.equal({ tensors.a:tolist(), tensors.b:tolist(), tensors.d:item(), metadata },
    { whole:tolist(), whole:tolist(), 2.0, { key = "value" } })
  local file = core.safetensors_open(path)
  check.equal({ file:describe("c") }, { "i64", { 0, 3 } })
  check.equal({ file:describe("e") }, {})
  file:close()
  os.remove(path)
end)

check.done()
