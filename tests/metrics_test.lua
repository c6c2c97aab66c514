-- metrics_test - the progress line, metrics.jsonl, resuming.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local core <const> = rille.core

local folder <const> = os.tmpname()
os.remove(folder)

local function read(path)
  local f = assert(io.open(path, "rb"))
  local bytes = f:read("a")
  f:close()
  return bytes
end

-- Something that collects what is written to it.
local function sink()
  local parts = {}
  return {
    write = function(_, ...) table.insert(parts, table.concat { ... }) return true end,
    flush = function() end,
    text = function() return table.concat(parts) end,
  }
end

local GiB <const> = 1 << 30
local memory <const> = { total = { current = GiB, peak = 1.2 * GiB }, limit = 24 * GiB }

local function record(step, changes)
  local r = {
    step = step, loss = 3.28412, grad_norm = 0.4123, lr = 5.98e-4, tokens = 5237, seconds = 0.301,
    data_seconds = 0.003, memory = memory,
  }
  for key, value in pairs(changes or {}) do r[key] = value end
  return r
end

local function line(options, changes, step)
  local out = sink()
  options.out = out
  local metrics = rille.Metrics(options)
  metrics:step(record(step or 1200, changes))
  metrics:close()
  return (out.text():gsub("\n$", ""))
end

check.test("the line has the agreed form", function()
  check.equal(line { total = 18865 }, "step 1200/18865 | loss 3.2841 | gnorm 0.41 | lr 5.98e-04 | "
    .. "301 ms (data 1%) | 17.4k tok/s | mem 1.2/24 GiB | eta 1h29m")
end)

check.test("the line: other sizes of its numbers, and without what is not known", function()
  local words = line({ total = 1200 }, { seconds = 0.0042, data_seconds = 0, tokens = 10,
    memory = { total = { peak = 5 << 20 }, limit = 24 * GiB }, grad_norm = 0.00123 })
  check.equal(words, "step 1200/1200 | loss 3.2841 | gnorm 1.2e-03 | lr 5.98e-04 | "
    .. "4.2 ms (data 0%) | 2.4k tok/s | mem 5.0 MiB/24 GiB | eta 0s")
  check.ok(line({ total = 1201 }, { seconds = 75 })
    :find(" | 75.0 s %(data 0%%%) | 70 tok/s | .* | eta 1m15s$"))
  for seconds, eta in pairs { [0.4] = "0s", [59.4] = "59s", [59.6] = "1m00s", [3599.6] = "1h00m",
    [86369] = "23h59m", [86370] = "1d00h", [150000] = "1d18h" } do
    check.equal(line({ total = 2 }, { seconds = seconds }, 1):match("eta (.*)$"), eta)
  end
  check.ok(line({}, { tokens = 3e6 }):find("^step 1200 | .* | 10.0M tok/s | mem 1.2/24 GiB$"))
  check.equal(line({}, { loss = 0 / 0, grad_norm = math.huge, seconds = 0, data_seconds = 0,
    memory = { total = { peak = 11 * GiB }, limit = 30.5 * GiB } }),
    "step 1200 | loss nan | gnorm inf | lr 5.98e-04 | mem 11/30 GiB")
  local out = sink()
  rille.Metrics { out = out }:step { step = 7 }
  check.equal(out.text(), "step 7\n")
end)

check.test("lines every so many steps, first and last; times are means between them", function()
  local out = sink()
  local metrics = rille.Metrics { total = 11, every = 5, out = out }
  for step = 1, 11 do
    metrics:step { step = step, seconds = step / 10, tokens = 100, data_seconds = step / 100 }
  end
  metrics:close()
  check.equal(out.text(), table.concat({
    "step 1/11 | 100 ms (data 10%) | 1.0k tok/s | eta 1s",
    "step 5/11 | 350 ms (data 10%) | 286 tok/s | eta 2s", -- (0.2 + 0.3 + 0.4 + 0.5) / 4
    "step 10/11 | 800 ms (data 10%) | 125 tok/s | eta 1s",
    "step 11/11 | 1100 ms (data 10%) | 91 tok/s | eta 0s\n",
  }, "\n"))
  check.equal(line({ every = 0 }, {}), "")
end)

check.test("metrics.jsonl: one object a step, flushed, numbers in full", function()
  local metrics = rille.Metrics { dir = folder .. "/a/b", every = 0, peak_flops = 1e12,
    layout = { dp = 1, tp = 2, pp = 4 } }
  local path = folder .. "/a/b/metrics.jsonl"
  metrics:step(record(1, { loss = 0.1 + 0.2, memory = core.memory(), flops = 3.01e10,
    extra = { fingerprint = "00ff", b = { x = 1.5 } } }))
  local first = read(path)
  check.ok(first:find('^{"step":1,"loss":0.30000000000000004,"grad_norm":0.4123,"lr":0.000598,'),
    first)
  local object = core.json_decode(first)
  check.equal({ object.tokens, object.seconds, object.fingerprint, object.b.x },
    { 5237, 0.301, "00ff", 1.5 })
  check.near(object.tokens_per_second, 5237 / 0.301, 1e-9)
  check.near(object.mfu, 0.1, 1e-12)
  check.equal(object.layout, { dp = 1, tp = 2, pp = 4 })
  check.equal(object.memory.parameters.peak, core.memory().parameters.peak)
  metrics:step { step = 2, loss = 0 / 0 }
  metrics:close()
  local lines = {}
  for text in io.lines(path) do table.insert(lines, text) end
  check.equal(#lines, 2)
  check.ok(lines[2]:find('"loss":null', 1, true) and lines[2]:find('"mfu":null', 1, true)
    and lines[2]:find('"bubble":null', 1, true), lines[2])
end)

local function steps_of(path)
  local steps = {}
  for text in io.lines(path) do table.insert(steps, core.json_decode(text).step) end
  return steps
end

local function run(dir, first, last, options)
  options = options or {}
  options.dir, options.every = dir, 0
  local metrics = rille.Metrics(options)
  for step = first, last do metrics:step(record(step)) end
  metrics:close()
end

check.test("resume: the file is cut back to the resumed step, then goes on", function()
  local dir = folder .. "/resume"
  run(dir, 1, 9)
  run(dir, 5, 7, { resumed = 4 })
  check.equal(steps_of(dir .. "/metrics.jsonl"), { 1, 2, 3, 4, 5, 6, 7 })
  run(dir, 8, 8, { resumed = 7 })
  check.equal(steps_of(dir .. "/metrics.jsonl"), { 1, 2, 3, 4, 5, 6, 7, 8 })
  check.equal(core.stat(dir .. "/metrics-1.jsonl"), nil)
end)

check.test("resume: a last line that a kill cut short goes", function()
  local dir = folder .. "/cut"
  run(dir, 1, 3)
  local path = dir .. "/metrics.jsonl"
  core.truncate(path, core.stat(path).size - 20)
  run(dir, 4, 4, { resumed = 3 })
  check.equal(steps_of(path), { 1, 2, 4 })
  run(folder .. "/fresh", 4, 5, { resumed = 3 }) -- another directory than before
  check.equal(steps_of(folder .. "/fresh/metrics.jsonl"), { 4, 5 })
end)

check.test("a new run puts the file of an old one aside", function()
  local dir = folder .. "/again"
  run(dir, 1, 3)
  run(dir, 1, 2)
  run(dir, 1, 1)
  check.equal(steps_of(dir .. "/metrics-1.jsonl"), { 1, 2, 3 })
  check.equal(steps_of(dir .. "/metrics-2.jsonl"), { 1, 2 })
  check.equal(steps_of(dir .. "/metrics.jsonl"), { 1 })
end)

check.test("a full disk and a directory that cannot be are errors with words", function()
  if core.stat "/dev/full" then
    local dir = folder .. "/full"
    core.make_directory(dir)
    os.execute(("ln -s /dev/full %s/metrics.jsonl"):format(dir))
    local metrics = rille.Metrics { dir = dir, every = 0 }
    metrics.is_resumed = true -- the device is not to be put aside
    check.raises(function() metrics:step(record(1)) end, "metrics.jsonl failed: No space left")
  end
  os.execute("touch " .. folder .. "/file")
  check.raises(function() run(folder .. "/file", 1, 1) end, folder:gsub("%p", "%%%0") .. "/file")
end)

check.test("options and records are checked", function()
  check.raises(function() rille.Metrics { evry = 1 } end, "metrics_test.lua:%d+: ",
    'Metrics has no option "evry"; did you mean "every"')
  check.raises(function() rille.Metrics { every = -1 } end, "every must be an integer from 0 on")
  check.raises(function() rille.Metrics { every = 0 }:step { loss = 1 } end,
    "metrics_test.lua:%d+: ", "step must be an integer, got nil")
end)

-- What a script writes to a terminal of 60 columns (by util-linux's script), or nil.
local function on_terminal(code)
  local log, file = os.tmpname(), os.tmpname()
  local f = assert(io.open(file, "w"))
  f:write('local rille = require "rille"\n', code)
  f:close()
  local program = (os.getenv "BUILD" or "build/release") .. "/rille"
  local worked = os.execute(("script -qec 'stty cols 60; %s %s' %s >%s.out 2>&1 </dev/null")
    :format(program, file, log, log))
  local text = worked and read(log):gsub("\r\n", "\n"):gsub("^Script started[^\n]*\n", "")
    :gsub("\n?Script done[^\n]*\n$", "")
  for _, path in ipairs { log, log .. ".out", file } do os.remove(path) end
  return text
end

local terminal_run <const> = [[
local metrics = rille.Metrics { every = 4, total = 6 }
local record = { seconds = 0.1, tokens = 5, loss = 2, lr = 0.001, grad_norm = 1 }
for step = 1, 5 do
  record.step = step
  metrics:step(record)
  local until_then = rille.core.clock() + 0.06
  while rille.core.clock() < until_then do end
  if step == 2 then metrics:say("held-out loss 1.5") end
end
metrics:close()
]]

check.test("on a terminal the line is rewritten in place, never wider than it", function()
  local text = on_terminal(terminal_run)
  if not text then return check.skip "no script(1) to make a terminal with" end
  local full = "step %d/6 | loss 2.0000 | gnorm 1.00 | lr 1.00e-03 | 100 ms (data 0%%) | 50 tok/s"
    .. " | eta %s"
  local clear = "\27[K"
  local function short(step) return full:format(step, "1s"):sub(1, 59) end
  check.equal(text, "\r" .. full:format(1, "1s") .. clear .. "\n"
    .. "\r" .. short(2) .. clear
    .. "\r" .. clear .. "held-out loss 1.5\n\r" .. short(2) .. clear
    .. "\r" .. short(3) .. clear
    .. "\r" .. full:format(4, "0s") .. clear .. "\n"
    .. "\r" .. short(5) .. clear .. "\n")
end)

check.test("only rank 0 writes", function()
  local text = on_terminal('require "rille".core.rank = 1\n' .. terminal_run)
  if not text then return check.skip "no script(1) to make a terminal with" end
  check.equal(text, "")
end)

os.execute("rm -r " .. folder)
check.done()
