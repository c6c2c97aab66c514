-- main - the benchmark: every figure beside its peer, measured in turns in one run.
--
-- For each case and number of threads all sides are started and warmed up, each in a process of
-- its own, bound to the same cores. A round asks the probe for the FMA peak (or the copy bandwidth)
-- and then each side for one run: A B C, B C A, ... So a disturbance meets all alike; best and
-- median of the rounds are printed, and the probe's spread says how quiet the machine was.
local folder = arg[0]:match("^(.*)/[^/]*$") or "."
package.path = folder .. "/?.lua;" .. package.path
local cases = require "cases"
local report = require "report"
local sides = require "sides"

local usage = [[
bench - Rille's speed and memory beside its peers'; writes build/bench.json
  --quick            fewer rounds: a look, not a figure to publish
  --only NAME        one case (may be repeated): gpt gpt2 add mlp pipeline replicas
                     tensor softmax layer_norm gelu adamw schedule start kernels
  --threads 1,2      numbers of threads
  --python PATH      the Python that has PyTorch (python3)
  --llmc DIR         a checkout of github.com/karpathy/llm.c, whose CPU trainer is then built
  --no-compile       without torch.compile (its first compilation takes minutes)
  --out FILE         where the JSON goes
  --profile          where the time of Rille's GPT step goes, by op and by shape; nothing else
  --functions        with --profile: by function too (perf)
]]

local function fail(words)
  io.stderr:write("bench: ", words, "\n")
  os.exit(2)
end

local function parse(argv)
  local o = {
    threads = { 1, 2 }, only = {}, any = true, python = "python3", build = os.getenv("BUILD") or
    "build/release", out = "build/bench.json", compile = true, folder = folder,
  }
  local at = 1
  local function value()
    at = at + 1
    return argv[at] or fail(argv[at - 1] .. " needs a value")
  end
  local actions = {
    ["--quick"] = function() o.quick = true end,
    ["--profile"] = function() o.profile = true end,
    ["--functions"] = function() o.functions = true end,
    ["--no-compile"] = function() o.compile = false end,
    ["--only"] = function() o.only[value()], o.any = true, false end,
    ["--python"] = function() o.python = value() end,
    ["--llmc"] = function() o.llmc = value() end,
    ["--out"] = function() o.out = value() end,
    ["--threads"] = function()
      o.threads = {}
      for word in value():gmatch("%d+") do o.threads[#o.threads + 1] = tonumber(word) end
      if #o.threads == 0 then fail("--threads needs numbers: 1,2") end
    end,
    ["--help"] = function()
      io.write(usage)
      os.exit(0)
    end,
  }
  while argv[at] do
    local action = actions[argv[at]] or fail("no option " .. argv[at] .. "; --help lists them")
    action()
    at = at + 1
  end
  local known = { kernels = true }
  for _, case in ipairs(cases) do known[case.name] = true end
  for name in pairs(o.only) do
    if not known[name] then fail("no case " .. name .. "; --help lists them") end
  end
  return o
end

-- What the probe says: GFLOP/s or GB/s, a list of one number a round.
local function probe_word(case) return case.flops and "fma" or case.bytes and "copy" or "fma" end

local function rounds(case, o, probe, running)
  local samples, machine = {}, {}
  for _, side in ipairs(running) do samples[side.name] = {} end
  for round = 1, o.quick and case.quick or case.repeats do
    machine[#machine + 1] = probe:numbers(probe_word(case))[1]
    for i = 1, #running do
      local side = running[(round + i) % #running + 1] -- nobody always follows the same one
      local seconds = side.worker:numbers(side.request)[1]
      if seconds and seconds > 0 then
        table.insert(samples[side.name], seconds / (case.per or 1))
      end
    end
  end
  machine[#machine + 1] = probe:numbers(probe_word(case))[1]
  return samples, machine
end

-- Runs a case at a number of threads; returns its figure (report.lua says what is in it).
local function measure(case, threads, o)
  local names = { "rille", table.unpack(case.peers) }
  local running, figure = {}, { case = case, threads = threads, sides = {}, missing = {} }
  local probe = sides.start(o, "probe", case, threads)
  for _, name in ipairs(names) do
    local side = sides.start(o, name, case, threads)
    if side.missing then
      figure.missing[name] = side.missing
    else
      running[#running + 1] = side
    end
  end
  local samples, machine = rounds(case, o, probe.worker, running)
  for _, side in ipairs(running) do
    local stats = side.stats and side.worker:stats() or {}
    figure.sides[side.name] = report.summary(samples[side.name], stats, side.worker.info)
    if side.worker.missing then figure.missing[side.name] = side.worker.missing end
    if not side.shared then side.worker:stop() end
  end
  figure.machine = report.spread(machine, probe_word(case))
  probe.worker:stop()
  return figure
end

local o = parse(arg)
sides.prepare(o)
if o.profile then
  local code
  for _, case in ipairs(cases) do
    if case.name == (next(o.only) or "gpt") then code = sides.profile(o, case) end
  end
  sides.finish(o)
  os.exit(code)
end
local figures = {}
report.heading(sides.machine(o))
for _, case in ipairs(cases) do
  if o.any or o.only[case.name] then
    for _, threads in ipairs(o.threads) do
      if threads == (case.only_threads or threads) then
        local figure = measure(case, threads, o)
        figures[#figures + 1] = figure
        report.line(figure)
      end
    end
  end
end
local kernels = (o.any or o.only.kernels) and sides.kernels(o) or {}
report.kernels(kernels)
report.footnotes(figures, o)
report.write_json(o.out, sides.machine(o), figures, kernels)
sides.finish(o)
