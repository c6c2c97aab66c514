-- data_test - texts, token files and tensors as batches; their order; bad files.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local data <const> = rille.data
local core <const> = rille.core

local folder <const> = os.tmpname()
os.remove(folder)
assert(os.execute("mkdir " .. folder))

local function write(name, bytes)
  local path = folder .. "/" .. name
  local f = assert(io.open(path, "wb"))
  f:write(bytes)
  f:close()
  return path
end

local function bytes_of(n)
  local parts = {}
  for i = 1, n do parts[i] = string.char(i * 7 % 256) end
  return table.concat(parts)
end

-- A token file in llm.c's format with 16-bit ids.
local function llmc(ids, count)
  local header = ("<i4"):rep(3):pack(20240520, 1, count or #ids) .. ("\0"):rep(1024 - 12)
  return header .. ("<" .. ("I2"):rep(#ids)):pack(table.unpack(ids))
end

local text <const> = bytes_of(1001)

check.test("text: inputs are the bytes, targets one further; the rest is held out", function()
  local set = data.text { write("a.txt", text), T = 10, val = 0.2 }
  check.equal({ set.vocab, set.train.n_windows, set.val.n_windows }, { 256, 79, 20 })
  local x, y = set.train:batch(0, 4)[1], set.train:batch(0, 4)[2]
  check.equal({ x.n, y.n, x:numel(), y:numel() }, { 4, 4, 40, 40 })
  local rows, targets = x:rows(0, 4), y:rows(0, 4)
  check.equal({ rows:dtype(), rows:shape() }, { "i64", 4, 10 })
  for i = 0, 3 do
    local window = set.train:window(i)
    local want = {}
    for k = 1, 10 do want[k] = text:byte(window * 10 + k) end
    check.equal(rows:tolist()[i + 1], want)
    for k = 1, 10 do want[k] = text:byte(window * 10 + k + 1) end
    check.equal(targets:tolist()[i + 1], want)
  end
  local held = set.val:batch(0, 1)
  check.equal(held[1]:rows(0, 1):tolist()[1][1], text:byte(801))
end)

check.test("rows: any cut of a batch gives the same samples", function()
  local set = data.text { write("a.txt", text), T = 10 }
  local x = set.train:batch(3, 8)[1]
  local whole = x:tensor():tolist()
  for first = 0, 7 do check.equal(x:rows(first, 1):tolist()[1], whole[first + 1]) end
  check.equal(x:rows(2, 3):tolist(), { whole[3], whole[4], whole[5] })
  check.raises(function() x:rows(7, 2) end, "samples 7 to 8 of a batch of 8")
  check.raises(function() x:rows(-1, 1) end, "batch of 8")
end)

check.test("order: a function of seed and sample; each epoch visits each window once", function()
  local path = write("a.txt", text)
  local a = data.text { path, T = 10, seed = 1 }.train
  local b = data.text { path, T = 10, seed = 1 }.train
  check.equal(b:batch(5, 4)[1]:tensor(), a:samples(20, 4)[1]:tensor():tolist())
  check.equal(a:batch(2, 10)[1]:tensor(), a:samples(20, 10)[1]:tensor():tolist())
  local orders = {}
  for epoch = 0, 1 do
    local seen, order = {}, {}
    for k = 0, a.n_windows - 1 do
      local window = a:window(epoch * a.n_windows + k)
      check.ok(window >= 0 and window < a.n_windows and not seen[window])
      seen[window] = true
      table.insert(order, window)
    end
    orders[epoch] = table.concat(order, " ")
  end
  check.ok(orders[0] ~= orders[1], "two epochs have the same order")
  local other = data.text { path, T = 10, seed = 2 }.train
  local same = 0
  for k = 0, a.n_windows - 1 do if a:window(k) == other:window(k) then same = same + 1 end end
  check.ok(same < a.n_windows // 4, "two seeds have the same order")
end)

check.test("evaluation walks the windows in order, and its last batch is smaller", function()
  local val = data.text { write("a.txt", text), T = 10, val = 0.2 }.val
  check.equal({ val.n_windows, val:n_batches(8) }, { 20, 3 })
  local firsts = {}
  for step = 0, 2 do
    local batch = val:batch(step, 8)
    for _, row in ipairs(batch[1]:tensor():tolist()) do table.insert(firsts, row[1]) end
  end
  check.equal(#firsts, 20)
  for i, first in ipairs(firsts) do check.equal(first, text:byte(800 + (i - 1) * 10 + 1)) end
  check.equal({ val:batch(2, 8).n, val:batch(3, 8).n, val:batch(0, 100).n }, { 4, 8, 20 })
  check.equal(val:batch(3, 8)[1]:tensor(), val:batch(0, 8)[1]:tensor():tolist())
end)

check.test("val: none, or a second file", function()
  local path = write("a.txt", text)
  check.equal(data.text { path, T = 10, val = 0 }.val, nil)
  check.equal(data.text { path, T = 10, val = 0 }.train.n_windows, 100)
  local set = data.text { path, T = 10, val = write("b.txt", bytes_of(31)) }
  check.equal({ set.train.n_windows, set.val.n_windows }, { 100, 3 })
  check.equal(set:batch(0, 2)[1]:tensor(), set.train:batch(0, 2)[1]:tensor():tolist())
end)

check.test("bytes: encode and decode", function()
  local set = data.text { write("a.txt", text), T = 10 }
  check.equal(set.encode "Aé", { 65, 195, 169 })
  check.equal(set.encode("A"):dtype(), "i64")
  check.equal(set.decode { 65, 10, 255 }, "A\n\255")
  check.equal(set.decode(set.encode(text)), text)
  check.raises(function() set.decode { 65, 256 } end, "id 256 at place 1 is no byte")
end)

check.test("the token file beside a text is kept, and made again when the text changes", function()
  local path = write("c.txt", bytes_of(100))
  local tokens = path .. ".tokens"
  data.text { path, T = 10, val = 0 }
  local made = core.stat(tokens)
  check.equal(made.size, 1024 + 200)
  os.execute("touch -d '1 hour ago' " .. path)
  data.text { path, T = 10, val = 0 }
  check.equal(core.stat(tokens).modified, made.modified, "it was made again without need")
  write("c.txt", ("x"):rep(100)) -- the same size, newer
  check.equal(data.text { path, T = 10, val = 0 }.train:batch(0, 1)[1]:tensor():tolist()[1][1], 120)
  write("c.txt", ("y"):rep(50)) -- another size, older
  os.execute("touch -d '2 hours ago' " .. path)
  check.equal(data.text { path, T = 10, val = 0 }.train.n_windows, 4)
  data.text { path, T = 10, val = 0, cache = folder .. "/elsewhere" }
  check.ok(core.stat(folder .. "/elsewhere.tokens"))
end)

check.test("a file that is no token file of ours is never overwritten", function()
  local path = write("d.txt", bytes_of(100))
  write("d.txt.tokens", ("my notes "):rep(200))
  check.raises(function() data.text { path, T = 10 } end, "data_test.lua:%d+", "d%.txt%.tokens",
    "expected llm.c's token header", "delete it, or give cache = another path")
  check.equal(core.stat(path .. ".tokens").size, 1800)
end)

check.test("missing and empty texts, and too small ones, say what is needed", function()
  check.raises(function() data.text { folder .. "/none.txt" } end, "data_test.lua:%d+: ",
    "there is no file .*none%.txt", "prepare_kjv")
  check.raises(function() data.text { write("empty.txt", ""), T = 10 } end, "empty.txt")
  check.raises(function() data.text { folder, T = 10 } end, "expected a text, found a directory")
  check.raises(function() data.text { write("tiny.txt", "ten bytes."), T = 10, val = 0 } end,
    "tiny.txt: 10 tokens for training make 0 windows of T = 10, a batch needs 1 %(11 tokens%)",
    "hint: more text, a smaller T or a smaller batch")
  check.raises(function() data.text { write("tiny.txt", bytes_of(100)), T = 10 } end,
    "tiny.txt: 10 tokens for evaluation %(val = 0.1%) make 0 windows")
  local set = data.text { write("small.txt", bytes_of(100)), T = 10, val = 0 }
  check.raises(function() set.train:batch(0, 10) end, "data_test.lua:%d+: ",
    "small.txt: 100 tokens for training make 9 windows of T = 10, a batch needs 10 %(101 tokens%)")
  check.equal(set.train:batch(0, 9)[1]:tensor():size(0), 9)
end)

check.test("options are checked by name and value", function()
  local path = write("a.txt", text)
  check.raises(function() data.text { path, TT = 3 } end, 'no option "TT"')
  check.raises(function() data.text { path, sed = 3 } end, 'no option "sed"; did you mean "seed"')
  check.raises(function() data.text { path, T = 0 } end, "T must be an integer from 1 on, got 0")
  check.raises(function() data.text { path, seed = 0.5 } end, "seed must be an integer, got 0.5")
  check.raises(function() data.text { path, val = 1 } end, "val must be the share")
  check.raises(function() data.text { T = 10 } end, "needs the path of a file first, got nil")
  check.raises(function() data.text() end, "takes a table")
  check.raises(function() data.text { path, T = 10 }.train:batch(-1, 2) end, "step from 0 on")
  check.raises(function() data.text { path, T = 10 }.train:batch(0) end, "number of samples")
end)

check.test("tokens: a prepared file, with ids checked against vocab", function()
  local path = write("t.bin", llmc { 5, 6, 7, 8, 9, 1000, 11 })
  local set = data.tokens { path, vocab = 1001, T = 2, val = 0 }
  check.equal({ set.vocab, set.train.n_windows }, { 1001, 3 })
  local in_order = {}
  for k = 0, 2 do
    in_order[set.train:window(k)] = set.train:samples(k, 1)[2]:tensor():tolist()[1]
  end
  check.equal(in_order, { [0] = { 6, 7 }, { 8, 9 }, { 1000, 11 } })
  check.raises(function() data.tokens { path, vocab = 1000, T = 2 } end, "data_test.lua:%d+: ",
    "t%.bin: expected ids below the vocabulary size 1000, found 1000 at index 5")
  check.raises(function() data.tokens { path, T = 2 } end,
    "vocab must be an integer from 1 on, got nil")
  check.raises(function() set.decode { 1 } end, "give it decode = function%(ids%)")
  local words = data.tokens { path, vocab = 1001, T = 2, val = 0,
    decode = function(ids) return table.concat(ids, " ") end }
  check.equal(words.decode { 1, 2 }, "1 2")
end)

check.test("tokens: truncated, foreign, missing and misnamed files", function()
  local whole = llmc { 1, 2, 3, 4, 5, 6, 7, 8 }
  check.raises(function() data.tokens { write("u.bin", whole:sub(1, -3)), vocab = 9, T = 2 } end,
    "u%.bin: expected 1040 bytes", "found 1038", "cut short")
  check.raises(function() data.tokens { write("u.bin", whole:sub(1, 100)), vocab = 9, T = 2 } end,
    "u%.bin", "100 bytes")
  check.raises(function() data.tokens { write("u.bin", whole .. "x"), vocab = 9, T = 2 } end,
    "u%.bin", "disagree")
  check.raises(function()
    data.tokens { write("u.bin", ("PK\3\4"):rep(500)), vocab = 9, T = 2 }
  end, "u%.bin")
  check.raises(function() data.tokens { folder .. "/none.bin", vocab = 9, T = 2 } end, "none%.bin",
    "No such file")
  check.raises(function()
    data.tokens { write("u.bin", whole), vocab = 9, T = 2, format = "numpy" }
  end, 'unknown token format "numpy"', "nanogpt")
  local raw = write("v.bin", ("<I2I2I2I2I2"):pack(1, 2, 3, 4, 5))
  local set = data.tokens { raw, vocab = 6, T = 2, val = 0, format = "nanogpt" }
  check.equal(set.train.n_windows, 2)
end)

check.test("batch: plain tensors", function()
  local x = rille.arange(12):view(4, 3)
  local batch = data.batch { x, rille.arange(4) }
  check.equal({ batch.n, batch[1].n, batch[1]:numel(), batch[2]:numel() }, { 4, 4, 12, 4 })
  check.equal(batch[1]:rows(1, 2), { { 3, 4, 5 }, { 6, 7, 8 } })
  check.equal(batch[2]:rows(3, 1), { 3 })
  check.raises(function() data.batch { x, rille.arange(5) } end,
    "entry 1 has 4 samples, entry 2 has 5")
  check.raises(function() data.batch { x, rille.tensor(1) } end, "entry 2 is a single number")
  check.raises(function() data.batch { x, "y" } end, "entry 2 is string")
  check.raises(function() data.batch {} end, "needs tensors")
end)

check.test("fixed: rows stay together, each epoch visits each once", function()
  local x = rille.arange(30):view(10, 3)
  local loader = data.fixed { x, rille.arange(10), seed = 4 }
  check.equal(loader.n_windows, 10)
  local seen = {}
  for step = 0, 1 do
    local batch = loader:batch(step, 5)
    local rows, labels = batch[1]:tensor():tolist(), batch[2]:tensor():tolist()
    for i, label in ipairs(labels) do
      check.equal(rows[i], { 3 * label, 3 * label + 1, 3 * label + 2 })
      check.ok(not seen[label])
      seen[label] = true
    end
    check.equal(batch[2]:rows(1, 2), { labels[2], labels[3] })
  end
  check.equal(data.fixed { { x, rille.arange(10) }, shuffled = false }:batch(1, 4)[2]:tensor(),
    { 4, 5, 6, 7 })
  check.raises(function() loader:batch(0, 11) end, "data.fixed has 10 samples, a batch needs 11")
  check.raises(function() data.fixed { x, sed = 1 } end, 'no option "sed"')
end)

os.execute("rm -r " .. folder)
check.done()
