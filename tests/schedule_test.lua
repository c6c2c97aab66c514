-- schedule_test - rille.schedule: known schedules, schedules of one's own, files; what is refused.
local check <const> = require "tests.check"
local rille <const> = require "rille"

local function write(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

-- 1F1B from its description; `late` microbatches fewer in the warm-up.
local function one_f_one_b(late)
  return function(r, p, m)
    local list, w = {}, math.max(0, math.min(m, p - 1 - r - (late or 0)))
    for i = 0, w - 1 do list[#list + 1] = r .. "F" .. i end
    for k = 0, m - w - 1 do
      list[#list + 1] = r .. "F" .. w + k
      list[#list + 1] = r .. "B" .. k
    end
    for k = m - w, m - 1 do list[#list + 1] = r .. "B" .. k end
    return list
  end
end

local function mine(options)
  local spec = { name = "mine", order = one_f_one_b() }
  for key, value in pairs(options or {}) do spec[key] = value end
  return rille.schedule(spec)
end

check.test("an order of one's own is the known schedule, list for list", function()
  for _, size in ipairs { { 1, 1 }, { 2, 3 }, { 4, 2 }, { 4, 9 } } do
    local o = { pp = size[1], microbatches = size[2] }
    local a, b = mine():build(o), rille.schedule "1f1b":build(o)
    check.equal(a:csv(), b:csv())
    for r = 0, o.pp - 1 do check.equal(a:row(r), b:row(r)) end
    check.equal(a:report().depths, b:report().depths)
    check.equal(a:report().peaks, b:report().peaks)
  end
end)

check.test("every known schedule is built, and has its sizes, holders and lists", function()
  local n = 0
  for _, name in ipairs(rille.schedules()) do
    local s = rille.schedule(name):build { pp = 3, microbatches = 5 }
    check.equal({ s:name(), s:ranks(), s:mbs(), s:stages() }, { name, 3, 5, 3 * s:chunks() })
    local kinds = {}
    for r = 0, 2 do
      for _, a in ipairs(s:row(r)) do
        kinds[a.kind] = (kinds[a.kind] or 0) + 1
        check.equal(s:holder(a.stage), r)
      end
    end
    local S = s:stages()
    check.equal({ kinds.F, kinds.STEP, kinds.REDUCE_GRAD }, { 5 * S, S, S })
    check.equal(kinds.SEND_F, kinds.RECV_F)
    check.equal(s:report().broken, 0)
    n = n + 1
  end
  check.equal(n, 13)
end)

check.test("rows have kinds, stages, microbatches and peers; orders their texts", function()
  local s = rille.schedule "zb-h1":build { pp = 2, microbatches = 2 }
  check.equal(s:order(0), { "0F0", "0F1", "0I0", "0W0", "0I1", "0W1" })
  check.equal(s:row(0)[1], { kind = "F", stage = 0, mb = 0 })
  check.equal(s:row(0)[2], { kind = "SEND_F", stage = 0, mb = 0, peer = 1 })
  check.raises(function() s:row(2) end, "rank 2: they count from 0 to 1", "schedule_test.lua")
  check.raises(function() s:holder(-1) end, "stage %-1")
  local pairs_of = rille.schedule "dualpipev":build { pp = 2, microbatches = 4 }
  check.ok(table.concat(pairs_of:order(0), " "):find("(3F2;0B0)OVERLAP_F_B", 1, true))
end)

check.test("simulate: bubbles as published, costs by stage, latency", function()
  local s = rille.schedule "1f1b":build { pp = 4, microbatches = 8 }
  local sim = s:simulate { F = 1, I = 1.5, W = 0.5 }
  check.near({ sim.makespan, sim.makespan_bubble, sim.span_bubble }, { 33, 9, 9 }, 1e-12)
  check.equal(sim.peaks, { 4, 3, 2, 1 })
  check.equal(#sim.spans[4], #s:row(3))
  check.near(s:simulate().makespan, 33, 1e-12)
  check.near({ s:bubbles { F = 2, I = 2, W = 2 } }, { 66, 18, 18 }, 1e-12)
  -- The slow stage is never idle between its first and last action; the others pay once each way.
  local uneven = s:simulate { stage_costs = { { 1, 1, 1 }, { 3, 3, 3 }, { 1, 1, 1 }, { 1, 1, 1 } } }
  check.near(uneven.busy, { 24, 72, 24, 24 }, 1e-12)
  check.near(s:simulate { stage_costs = { { 1, 0, 0, 2 }, { 1, 0, 0, 2 }, { 1, 0, 0, 2 },
    { 1, 0, 0, 2 } } }.makespan, 33, 1e-12)
  local hop = rille.schedule "1f1b":build { pp = 8, microbatches = 32 }:simulate { hop = 0.4 }
  check.near(hop.makespan_bubble / 96, 0.502, 5e-4)
  local bytes = {}
  for i = 1, 4 do bytes[i] = { 100, 10, 1 } end
  check.near(s:simulate { bytes = bytes }.peak_bytes, { 440, 330, 220, 110 }, 1e-12)
end)

check.test("ledger: idle time by cause, from spans as the simulator gives them", function()
  local s = rille.schedule "1f1b":build { pp = 4, microbatches = 8 }
  local even = s:ledger(s:simulate().spans)
  check.near(even.idle, { 9, 9, 9, 9 }, 1e-9)
  check.equal({ even.latest, even.lateness }, { nil, 0.0 })
  check.near(even.causes[4].warm_up + even.causes[4].cool_down, 9, 1e-9)
  local state, slow = {}, nil
  for _ = 1, 3 do
    local uneven = s:ledger(s:simulate { stage_factor = { 1, 1, 1.5, 1 } }.spans)
    check.equal(uneven.latest, 2)
    check.ok(uneven.words:find("the latest is rank 2", 1, true))
    slow = rille.core.ledger_watch(state, uneven, 3, 0.02)
  end
  check.equal(slow, 2)
  check.equal(rille.core.ledger_watch(state, even, 3, 0.02), nil)
  -- A message half a unit on its way holds up its receiver for that long.
  local gpipe = rille.schedule "gpipe":build { pp = 2, microbatches = 2 }
  local spans = gpipe:simulate { hop = 0.5 }.spans
  for r = 0, 1 do
    for i, a in ipairs(gpipe:row(r)) do
      for k, b in ipairs(gpipe:row(1 - r)) do
        if b.kind == "SEND_" .. a.kind and a.mb == b.mb and spans[r + 1][i][3] > 0 then
          local span, sent = spans[r + 1][i], spans[2 - r][k][1]
          span[4], span[5], span[6] = b.stage, sent, sent + 0.5
        end
      end
    end
  end
  local held = gpipe:ledger(spans)
  -- Rank 0 waits for both, there and back; rank 1 for the first, and at the end for rank 0.
  check.near({ held.causes[1].link, held.causes[2].link }, { 1, 1 }, 1e-9)
  check.near(held.link, { { 0, 1 }, { 1, 0 } }, 1e-9)
  -- The same packed as the executor gives it, on clocks that are not aligned.
  local packed = {}
  for r = 1, 2 do
    local words = {}
    for i, span in ipairs(spans[r]) do
      words[i] = ("dddddd"):pack(span[1] - r, span[2] - r, span[3], span[4] or -1,
        (span[5] or 0) - (3 - r), (span[6] or 0) - r) -- sent: by the other one's clock
    end
    packed[r] = table.concat(words)
  end
  check.near(gpipe:ledger(packed, { 1, 2 }).causes, held.causes, 1e-9)
  check.raises(function() gpipe:ledger { {}, {} } end, "spans%[1%] must have one entry for each")
  check.raises(function() gpipe:ledger { packed[1], "abc" } end, "spans%[2%] must have one entry")
  check.raises(function() gpipe:ledger(packed, { 1 }) end, "clocks%[2%] must be a number")
end)

check.test("compare: predicted above measured, and both steps", function()
  local s = rille.schedule "1f1b":build { pp = 4, microbatches = 8 }
  local spans = s:simulate { F = 0.01, I = 0.01, W = 0.01, hop = 0.002 }.spans
  local svg, figures = s:compare(spans)
  check.ok(svg:find(">predicted<", 1, true) and svg:find(">measured<", 1, true))
  check.near({ figures.predicted, figures.predicted_bubble }, { 0.33, 0.09 }, 1e-9)
  check.ok(figures.measured > 0.33)
  check.near(select(2, s:compare(spans, nil, 0.002)).predicted, figures.measured, 1e-9)
  check.raises(function() s:compare {} end, "spans%[1%] must have")
end)

check.test("text, csv, json, svg, html, trace: what rille schedule prints", function()
  local s = rille.schedule "interleaved":build { pp = 2, microbatches = 4, stages_per_rank = 3 }
  local program = (os.getenv "BUILD" or "build/release") .. "/rille"
  for _, form in ipairs { "csv", "json", "svg", "html", "trace" } do
    local command = program .. " schedule interleaved -p 2 -v 3 -m 4 --format " .. form
    local pipe = assert(io.popen(command))
    check.equal(s[form](s), pipe:read("a"), form)
    pipe:close()
  end
  check.ok(s:text { width = 80 }:find("rank 0", 1, true))
  check.ok(tostring(s):find("interleaved: 2 ranks, 6 stages", 1, true))
end)

check.test("placements: loop, v, wave, a list, a function", function()
  local function holders(placement, v)
    local s = rille.schedule {
      placement = placement, stages_per_rank = v,
      order = function(r, p, m)
        local list, own = {}, {}
        local by = type(placement) == "function" and placement(p, v) or placement
        for stage = 0, p * v - 1 do
          local c, k = stage // p, stage % p
          local holder = type(by) == "table" and by[stage + 1]
            or (by == "loop" or c % 2 == 0) and k or p - 1 - k
          if holder == r then own[#own + 1] = stage end
        end
        for i = 0, m - 1 do
          for _, stage in ipairs(own) do list[#list + 1] = stage .. "F" .. i end
          for k = #own, 1, -1 do list[#list + 1] = own[k] .. "B" .. i end
        end
        return list
      end,
    }:build { pp = 2, microbatches = 1 }
    local list = {}
    for stage = 0, s:stages() - 1 do list[#list + 1] = s:holder(stage) end
    return list
  end
  check.equal(holders("loop", 1), { 0, 1 })
  check.equal(holders("v", 2), { 0, 1, 1, 0 })
  check.equal(holders({ 1, 0, 0, 1 }, 2), { 1, 0, 0, 1 })
  check.equal(holders(function(p) return { p - 1, 0 } end, 1), { 1, 0 })
end)

check.test("a wrong order is refused with the table, the arrow and the cycle", function()
  local words = check.raises(function()
    mine { order = function(r) return { r .. "F0", r .. "F1", r .. "B1", r .. "B0" } end }
      :build { pp = 2, microbatches = 3 }
  end, "schedule_test.lua:%d+: ", "the schedule is refused: mine breaks invariant 1", "%^ here")
  check.ok(words:find("rank 0", 1, true))
  -- Rank 1 wants microbatch 1 before it gives back the gradient of 0, rank 0 sends 1 after it.
  check.raises(function()
    mine { order = function(r)
      return r == 0 and { "0F0", "0B0", "0F1", "0B1" } or { "1F0", "1F1", "1B0", "1B1" }
    end }:build { pp = 2, microbatches = 2 }
  end, "breaks invariant 4", "who waits for whom", "rank 0 stands at 0B0", "rank 1 stands at 1F1")
  check.raises(function()
    mine { memory = function() return 2 end }:build { pp = 4, microbatches = 8 }
  end, "breaks invariant 5")
  check.equal(mine { memory = function(r, p, m) return math.min(m, p - r) end }
    :build { pp = 4, microbatches = 8 }:report().bound, { 4, 3, 2, 1 })
end)

check.test("descending backwards are allowed, to rounding", function()
  local s = mine { order = function(r) return { r .. "F0", r .. "F1", r .. "B1", r .. "B0" } end }
    :build { pp = 2, microbatches = 2 }
  check.ok(s:report().is_to_rounding)
  check.ok(not mine():build { pp = 2, microbatches = 2 }:report().is_to_rounding)
end)

check.test("a wrong text names rank, place and text; an error in order its own line", function()
  check.raises(function()
    mine { order = function(r) return { r .. "F0", r .. "X0" } end }
      :build { pp = 2, microbatches = 1 }
  end, 'order%(0, 2, 1%)%[2%] is "0X0"', "schedule_test.lua")
  check.raises(function()
    mine { order = function() return { "0F0", 7 } end }:build { pp = 1, microbatches = 1 }
  end, "order%(0, 1, 1%)%[2%] is 7")
  check.raises(function()
    mine { order = function() end }:build { pp = 1, microbatches = 1 }
  end, "must return a list of actions", "got nil")
  check.raises(function()
    mine { order = function(r) local none = nil; return none[r] end }
      :build { pp = 1, microbatches = 1 }
  end, "^tests/schedule_test.lua:%d+: attempt to index a nil value")
  check.raises(function()
    mine { memory = function() return "2" end }:build { pp = 1, microbatches = 1 }
  end, "memory%(0, 1, 1%) must be a number of activations")
end)

check.test("recipes are checked where they are written", function()
  check.raises(function() rille.schedule { name = "x" } end, "needs order = function%(r, p, m%)")
  check.raises(function() rille.schedule { order = print, odrer = 1 } end, 'did you mean "order"')
  check.raises(function() mine { placement = "u" } end, 'placement = "u", valid are "loop"')
  check.raises(function() mine { stages_per_rank = 0 } end, "stages_per_rank = 0 must be")
  check.raises(function() rille.schedule(3) end, "a name or a table, got number")
  check.raises(function()
    mine { placement = { 0, 1, 2 } }:build { pp = 2, microbatches = 1 }
  end, "ranks of 3 stages, but pp = 2 with stages_per_rank = 1 make 2")
  check.raises(function()
    mine { placement = { 0, 2 } }:build { pp = 2, microbatches = 1 }
  end, "puts stage 1 on rank 2; ranks are 0 to 1")
  check.raises(function()
    mine { placement = { 0, 0 } }:build { pp = 2, microbatches = 1 }
  end, "rank 0 holds 2 stages")
end)

check.test("constraints speak of the user's options", function()
  local function refused(name, o, ...)
    check.raises(function() rille.schedule(name):build(o) end, "schedule_test.lua:%d+: ", ...)
  end
  refused("zbv", { pp = 4, microbatches = 8, stages_per_rank = 3 },
    "stages_per_rank = 3: the schedule zbv has 2 stages a rank", "interleaved, bfs$")
  refused("1f1b", { pp = 4, microbatches = 8, stages_per_rank = 2 }, "has 1 stage a rank; with 2")
  refused("hanayo", { pp = 4, microbatches = 8, stages_per_rank = 3 }, "has 2, 4, 6, ... stages")
  refused("1f1b", { pp = 0, microbatches = 8 }, "pp = 0 must be a whole number from 1")
  refused("1f1b", { pp = 4, microbatches = 0 }, "microbatches = 0",
    "batch.global / %(dp x batch.micro%)")
  refused("1f1b", { pp = 4, microbatches = 2.5 }, "microbatches = 2.5")
  refused("1f1b", { pp = 4, microbatches = 8, group = 4 }, "only the schedule interleaved")
  refused("1f1b", { pp = 4, microbatch = 8 }, 'did you mean "microbatches"')
  refused("interleaved", { pp = 8, microbatches = 24, stages_per_rank = 2, group = 5 },
    "breaks invariant 4", "group = 5 does not suit", "good values are 8, 12, 13, 14, 15, 16, 24")
  check.raises(function()
    mine { stages_per_rank = 2 }:build { pp = 2, microbatches = 2, stages_per_rank = 1 }
  end, "stages_per_rank = 1, but the schedule mine has stages_per_rank = 2")
end)

check.test("a good group has no more bubble, a costly one has a warning", function()
  local function build(group)
    return rille.schedule "interleaved":build { pp = 4, microbatches = 9, stages_per_rank = 2,
      group = group }
  end
  check.ok(build(6):report().warning:find("costs more than the default", 1, true))
  check.equal(build(5):report().warning, nil) -- the rest, 4, is p
  check.equal(build():report().warning, nil)
  check.near(build(5):simulate().makespan_bubble, 4.5, 1e-12)
  check.ok(build(6):simulate().makespan_bubble > 4.5)
  check.near(build():simulate().makespan_bubble, 4.5, 1e-12)
end)

check.test("edges beside the chain and tied weights come into the lists", function()
  local s = rille.schedule "1f1b":build { pp = 3, microbatches = 2, edges = { { 0, 2, false } },
    tied = { { 0, 2 } } }
  local n = { SEND_F = 0, RECV_B = 0, REDUCE_TIED = 0 }
  for r = 0, 2 do
    for _, a in ipairs(s:row(r)) do
      if n[a.kind] then n[a.kind] = n[a.kind] + 1 end
    end
  end
  check.equal(n, { SEND_F = 6, RECV_B = 4, REDUCE_TIED = 2 })
  check.raises(function()
    rille.schedule "1f1b":build { pp = 3, microbatches = 2, edges = { { 2, 0 } } }
  end, "it must lead forward")
  check.raises(function()
    rille.schedule "1f1b":build { pp = 3, microbatches = 2, tied = { { 0, 3 } } }
  end, "tied weight on stage 3")
end)

check.test("schedule_from: names, scripts, lists", function()
  local script, csv = os.tmpname() .. ".lua", os.tmpname() .. ".csv"
  local f = [[
    local rille = require "rille"
    return rille.schedule { name = "all", order = function(r, p, m)
      local list = {}
      for i = 0, m - 1 do list[#list + 1] = r .. "F" .. i end
      for i = 0, m - 1 do list[#list + 1] = r .. "B" .. i end
      return list
    end }
  ]]
  write(script, f)
  local gpipe = rille.schedule "gpipe":build { pp = 2, microbatches = 3 }
  check.equal(rille.schedule_from(script):build { pp = 2, microbatches = 3 }:csv(), gpipe:csv())
  check.equal(rille.schedule_from "GPipe":build { pp = 2, microbatches = 3 }:csv(), gpipe:csv())
  write(csv, gpipe:csv())
  check.equal(rille.schedule_from(csv):build { pp = 2, microbatches = 3 }:row(1), gpipe:row(1))
  check.raises(function()
    rille.schedule_from(csv):build { pp = 2, microbatches = 4 }
  end, "microbatches = 4 %(it is batch.global", "is for microbatches = 3")
  write(csv, "0F0,0B0\n1F0,1Q0\n")
  check.raises(function() rille.schedule_from(csv):build {} end, "row 1, cell 1: `1Q0`")
  write(script, "return 7")
  check.raises(function() rille.schedule_from(script) end, "must return a rille.schedule{...}; "
    .. "it returned number")
  write(script, "return rille.schedule {")
  check.raises(function() rille.schedule_from(script) end, "the schedule .*%.lua:1: ")
  os.remove(script)
  os.remove(csv)
  check.raises(function() rille.schedule_from(script) end, "No such file")
  check.raises(function() rille.schedule_from "1f1" end, 'did you mean "1f1b"', "hanayo")
end)

-- Exit code, stdout and stderr of `rille schedule`.
local function tool(arguments)
  local out, err = os.tmpname(), os.tmpname()
  local program = (os.getenv "BUILD" or "build/release") .. "/rille"
  local _, _, code = os.execute(("%s schedule %s >%s 2>%s"):format(program, arguments, out, err))
  local texts = {}
  for i, path in ipairs { out, err } do
    local file = assert(io.open(path))
    texts[i] = file:read("a")
    file:close()
    os.remove(path)
  end
  return code, texts[1], texts[2]
end

check.test("rille schedule x.lua draws, checks and refuses schedules of one's own", function()
  local script = os.tmpname() .. ".lua"
  write(script, [[
    return require("rille").schedule { name = "last first", order = function(r, p, m)
      local list = {}
      for i = 0, m - 1 do list[#list + 1] = r .. "F" .. i end
      for i = 0, m - 1 do list[#list + 1] = r .. "B" .. (r == 0 and m - 1 - i or i) end
      return list
    end }
  ]])
  local code, out = tool(script .. " -p 1 -m 3 --format csv")
  check.equal({ code, out }, { 0, "0F0,0F1,0F2,0B2,0B1,0B0\n" })
  local words
  code, out, words = tool(script .. " -p 1")
  check.ok(code == 2 and out == "" and words:find("-m is missing", 1, true))
  write(script, "return require('rille').schedule { order = function() error('why not') end }")
  code, out, words = tool(script .. " -p 2 -m 2")
  check.equal({ code, out }, { 1, "" })
  check.ok(words:find(":1: why not", 1, true), words)
  write(script, "return require('rille').schedule { order = function(r) "
    .. "return r == 0 and {'0B0', '0F0'} or {'1F0', '1B0'} end }")
  code, out, words = tool(script .. " -p 2 -m 1")
  check.equal({ code, out }, { 1, "" })
  check.ok(words:find("breaks invariant 2", 1, true) and words:find("^ here", 1, true))
  os.remove(script)
end)

check.test("rille schedule --compare prints the published latency table", function()
  -- Makespan overhead, p = 8, m = 32, F = I = W = 1, interleaved N = p, pairs atomic at F + B.
  local published = {
    ["1f1b"] = "21.9 29.0 36.0 50.2", ["eager-1f1b"] = "21.9 23.3 24.8 27.7",
    gpipe = "21.9 23.3 24.8 27.7", interleaved = "10.9 14.1 17.2 23.4",
    ["zb-h1"] = "7.3 10.2 13.1 19.0", ["zb-h2"] = "7.3 8.0 8.8 10.2", zbv = "3.6 7.1 10.5 17.7",
    dualpipev = "7.3 15.3 23.9 40.9",
  }
  local code, out = tool "--compare -p 8 -m 32 --overlap 3"
  check.equal(code, 0)
  local n, rows = 0, 0
  for line in out:gmatch "[^\n]+" do
    local name = line:match "^(%S+) +%d+ +[%d.]+%%"
    rows = name and rows + 1 or rows
    if published[name] then
      n = n + 1
      local found = {}
      for x in line:gmatch "([%d.]+)%%" do found[#found + 1] = x end
      check.equal(table.concat(found, " ", 1, 4), published[name], name)
    end
  end
  check.equal({ n, rows }, { 8, 13 })
  local words
  code, out, words = tool "--compare -p 8"
  check.ok(code == 2 and out == "" and words:find("-m is missing", 1, true))
  code, out, words = tool "zbv --compare -p 8 -m 8"
  check.ok(code == 2 and out == "" and words:find("--compare takes", 1, true))
end)

check.test("what is under construction or foreign is refused", function()
  local half = rille.core.sched_new { name = "x", placement = "loop", ranks = 1, chunks = 1,
    mbs = 1 }
  check.raises(function() half:csv() end, "not finished")
  check.raises(function() rille.core.sched_push(3, 0, {}) end, "a schedule is wanted, got number")
  local s = mine():build { pp = 1, microbatches = 1 }
  check.raises(function() rille.core.sched_push(s, 0, {}) end, "finished")
  check.raises(function() s:simulate { hops = 1 } end, 'no option "hops"; did you mean "hop"')
  check.raises(function() s:simulate { F = -1 } end, "F: a number from 0 on is wanted, got %-1")
  check.raises(function() s:simulate { stage_costs = { 1 } } end, "entry 1 must be a list of 3")
end)

check.done()
