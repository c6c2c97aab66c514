-- pipeline_matrix - every schedule and layout against one process, thousands of cases in a launch.
--
--     mpirun -n 8 rille tests/pipeline_matrix.lua                 every two values meet
--     mpirun -n 8 rille tests/pipeline_matrix.lua --full [K/N]    all cases, or the K-th of N parts
--     mpirun -n 8 rille tests/pipeline_matrix.lua tp ...          the same of tp 2 and 4, not of 1
--     mpirun -n 8 rille tests/pipeline_matrix.lua --case "pp=4 pipeline=zbv stages_per_rank=2 ..."
--
-- The world is cut into teams that run different cases at the same time. A team's first rank also
-- runs the oracle: the same trainer in a group of one. Pipelines alone must give its bits:
-- gradients after the first step, weights after the last, loss, norm, fingerprint. Replicas and tp
-- give them to rounding: |a - b| <= 1e-6 (f64: 1e-13) x the model's largest magnitude. Initial
-- weights have the same fingerprint under all, and what several ranks hold is the same there, bit
-- for bit, after every step.
local core <const> = require "rille".core
local rille <const> = require "rille"
local pairwise <const> = require "tests.pairwise"
local pipelines <const> = require "tests.pipelines"

local STEPS <const>, SEED <const> = 3, 5
local world <const> = core.comm_world()
local alone <const> = world:split(world:rank())

-- ---- cases

local names <const> = { "pp", "pipeline", "stages_per_rank", "m", "ragged", "dp", "recompute",
  "dropout", "tied", "loss", "clip", "dtype", "optimizer", "tp", "sequence", "kv_heads" }

-- "zbv 2": every schedule at the stages a rank that it allows, of 1 to 3 and, for waves, 4.
local function all_schedules()
  local list = {}
  for _, t in ipairs(core.sched_types()) do
    for v = t.chunks_min, t.chunks_max == 0 and 4 or t.chunks_max, t.chunks_step do
      if v <= 3 or t.name == "hanayo" then table.insert(list, t.name .. " " .. v) end
    end
  end
  return list
end

local microbatches <const> = { name = "m", 1, 2, 3, 4, 5, 6, 7, 8, 9 }

local is_cut = arg[1] == "tp" -- by tp
if is_cut then table.remove(arg, 1) end

local dimensions <const> = {
  { name = "schedule", table.unpack(all_schedules()) },
  microbatches,
  { name = "pp", 1, 2, 3, 4 },
  { name = "ragged", "no", "yes" },
  { name = "dp", 1, 2 },
  { name = "recompute", "no", "yes" },
  { name = "dropout", 0, 0.1 },
  { name = "tied", "no", "yes" },
  { name = "loss", "mean", "sum", "token" },
  { name = "clip", "no", "yes" },
  { name = "tp", table.unpack(is_cut and { 2, 4 } or { 1 }) },
  { name = "sequence", table.unpack(is_cut and { "no", "yes" } or { "no" }) },
  { name = "kv_heads", table.unpack(is_cut and { 4, 2, 1 } or { 4 }) },
  { name = "dtype", "f32", "f64" },
  { name = "optimizer", "sgd", "adamw" },
}

local function size_of(case) return case.pp * case.dp * case.tp end

local function is_valid(case)
  return (case.m or 1) <= 2 * case.pp + 1 and size_of(case) <= 8
end

local function finish(case)
  if case.schedule then
    local name, v = case.schedule:match("^(%S+) (%d+)$")
    case.pipeline, case.stages_per_rank = name, math.tointeger(v)
  end
  return case
end

local function text_of(case)
  local words = {}
  for _, name in ipairs(names) do table.insert(words, name .. "=" .. tostring(case[name])) end
  return table.concat(words, " ")
end

local function parse(text)
  local case = {}
  for name, value in text:gmatch("(%S+)=(%S+)") do case[name] = tonumber(value) or value end
  for _, name in ipairs(names) do
    if case[name] == nil then error("--case needs " .. name .. "=", 0) end
  end
  return case
end

-- Of these dimensions each case of the whole matrix has one value, in turns; with tp of two more.
local in_turn <const> = { dtype = true, optimizer = true, m = is_cut, clip = is_cut }

-- The n-th case's value of a dimension in turn, of those that fit the case.
local function turn_of(case, dimension, k, n)
  local fitting = {}
  for _, value in ipairs(dimension) do
    case[dimension.name] = value
    if is_valid(case) then table.insert(fitting, value) end
  end
  return fitting[pipelines.scramble(n, k) % #fitting + 1]
end

-- fn(case, n) for all from dimension k on; n cases were there before. Gives how many there are.
local function each_case(case, k, n, fn)
  local dimension = dimensions[k]
  if not dimension then
    if not is_valid(case) then return n end
    fn(case, n + 1)
    return n + 1
  end
  if in_turn[dimension.name] then return each_case(case, k + 1, n, fn) end
  for _, value in ipairs(dimension) do
    case[dimension.name] = value
    n = each_case(case, k + 1, n, fn)
  end
  case[dimension.name] = nil
  return n
end

local function whole_matrix(part, parts)
  local list = {}
  each_case({}, 1, 0, function(case, n)
    if n % parts ~= part % parts then return end
    local one = {}
    for key, value in pairs(case) do one[key] = value end
    for k, dimension in ipairs(dimensions) do
      if in_turn[dimension.name] then one[dimension.name] = turn_of(one, dimension, k, n) end
    end
    table.insert(list, one)
  end)
  return list
end

-- ---- running one

-- Units of the model of a case: uneven stages where there are few; few different models, so that
-- oracles are shared.
local function units_of(case)
  local n_stages = case.pp * case.stages_per_rank
  for _, units in ipairs { 5, 7, 9, 13 } do
    if n_stages < units then return units end
  end
  return n_stages
end

-- Samples a step: m microbatches of two for each replica, the last one of a replica smaller.
local function samples_of(case)
  return case.dp * 2 * case.m - (case.ragged == "yes" and 1 or 0)
end

local function trainer_of(case, comm, is_oracle)
  local n = samples_of(case)
  local rate = case.loss == "sum" and 0.02 / n or 0.1
  local spec = { case.optimizer, lr = case.optimizer == "adamw" and 0.01 or rate,
    clip = case.clip == "yes" and 1e-3 or nil }
  if case.optimizer == "sgd" then spec.momentum = 0.9 end
  return rille.Trainer {
    model = pipelines.model { units = units_of(case), dtype = case.dtype, dropout = case.dropout,
      tied = case.tied == "yes", kv_heads = case.kv_heads },
    loss = pipelines.losses[case.loss], optimizer = spec, seed = SEED, log = 0,
    batch = { global = n, micro = 2 }, recompute = not is_oracle and case.recompute == "yes",
    parallel = is_oracle and { comm = comm } or { comm = comm, pp = case.pp, dp = case.dp,
      tp = case.tp, sequence_parallel = case.sequence == "yes",
      pipeline = case.pipeline, stages_per_rank = case.stages_per_rank,
      bucket = case.ragged == "yes" and 600 or nil }, -- bytes: several to a stage
  }
end

local function run(case, comm, is_oracle)
  local n, is_masked = samples_of(case), case.loss == "token"
  local result = pipelines.run(trainer_of(case, comm, is_oracle), function(step)
    return pipelines.batch(n, step, is_masked)
  end, STEPS)
  return pipelines.collect(result, not is_oracle and comm or nil)
end

local oracles = {}

local function oracle_of(case)
  local key = { units_of(case), samples_of(case) }
  for _, name in ipairs { "dropout", "tied", "loss", "clip", "dtype", "optimizer", "kv_heads" } do
    table.insert(key, case[name])
  end
  key = table.concat(key, " ")
  if not oracles[key] then oracles[key] = run(case, alone, true) end
  return oracles[key]
end

-- Runs a case on a team; its first rank gives words if something differs.
local function check_case(case, team)
  local have = run(case, team, false)
  if team:rank() > 0 then return nil end
  local is_exact = case.dp * case.tp == 1
  local tolerance = is_exact and 0 or case.dtype == "f64" and 1e-13 or 1e-6
  return pipelines.judge(have, oracle_of(case), tolerance,
    { is_adaptive = case.optimizer == "adamw" })
end

-- ---- all of them

-- Sizes of teams that run at the same time; the world is cut anew for each.
local phases <const> = { { 8 }, { 6, 2 }, { 4, 4 }, { 3, 3, 2 }, { 2, 2, 2, 2 },
  { 1, 1, 1, 1, 1, 1, 1, 1 } }

-- Which team of which phase runs a case: teams of its size take turns.
local function deal(cases)
  local teams, turn, dealt = {}, {}, {}
  for p, sizes in ipairs(phases) do
    dealt[p] = {}
    for t, size in ipairs(sizes) do
      dealt[p][t] = {}
      teams[size] = teams[size] or {}
      table.insert(teams[size], dealt[p][t])
    end
  end
  for _, case in ipairs(cases) do
    local size = size_of(case)
    turn[size] = (turn[size] or 0) % #teams[size] + 1
    table.insert(teams[size][turn[size]], case)
  end
  return dealt
end

local function guarded(case, team)
  local text = text_of(case)
  core.doing(text)
  local good, words = xpcall(check_case, debug.traceback, case, team)
  if good then return words and { text = text, words = words } end
  error(("case %q: %s"):format(text, words), 0) -- other ranks wait for this one: the job ends
end

-- This rank's part of a phase; failures go to `failures`.
local function run_phase(sizes, lists, failures)
  local team, number = pipelines.team(world, sizes)
  for k, case in ipairs(number and lists[number] or {}) do
    local failure = guarded(case, team)
    if failure then table.insert(failures, failure) end
    if k % 16 == 0 then pipelines.tidy() end
  end
  world:barrier()
end

local function run_all(cases)
  local failures, start = {}, core.clock()
  for p, lists in ipairs(deal(cases)) do
    run_phase(phases[p], lists, failures)
    print(("teams of %s: %.1f s"):format(table.concat(phases[p], ", "), core.clock() - start))
  end
  return failures
end

local function run_single(case)
  local size, failures = size_of(case), {}
  if size > world:size() then error(("the case needs %d ranks"):format(size), 0) end
  local team = pipelines.team(world, { size })
  if team then table.insert(failures, guarded(case, team)) end
  world:barrier()
  return failures
end

local PAIR <const> = "<s4s4"

local function report(failures, n)
  local parts = {}
  for i, failure in ipairs(failures) do parts[i] = PAIR:pack(failure.text, failure.words) end
  local n_failed = 0
  for _, text in ipairs(world:all_gather(table.concat(parts))) do
    local at = 1
    while at <= #text do
      local case, words
      case, words, at = PAIR:unpack(text, at)
      n_failed = n_failed + 1
      print(("not ok %s\n    alone: mpirun -n %d rille tests/pipeline_matrix.lua --case %q")
        :format(words, world:size(), case))
    end
  end
  print(("%d passed, %d failed"):format(n - n_failed, n_failed))
  os.exit(n_failed == 0 and n > 0, true)
end

local function cases_of(mode, what)
  if mode == "--full" then
    local part, parts = (what or "1/1"):match("^(%d+)/(%d+)$")
    local cases = whole_matrix(tonumber(part), tonumber(parts))
    return cases, ("%d cases"):format(#cases)
  end
  local cases, covered, n_pairs = pairwise {
    dimensions = dimensions, is_valid = is_valid, seed = 1,
  }
  if covered ~= n_pairs then error(("only %d of %d pairs"):format(covered, n_pairs), 0) end
  if mode ~= "--every" then
    return cases, ("%d cases, all %d pairs of values"):format(#cases, n_pairs)
  end
  local some, step = {}, math.tointeger(tonumber(what))
  for i = 1, #cases, step do table.insert(some, cases[i]) end
  return some, ("%d of the %d cases in which all pairs of values meet"):format(#some, #cases)
end

local mode, what = arg[1], arg[2]
if mode == "--case" then report(run_single(parse(what)), 1) end
if world:size() ~= 8 then error("the matrix needs 8 ranks", 0) end
local cases, words = cases_of(mode, what)
for _, case in ipairs(cases) do finish(case) end
print("matrix: " .. words)
report(run_all(cases), #cases)
