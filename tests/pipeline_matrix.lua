-- pipeline_matrix - every schedule and layout against one process, thousands of cases in a launch.
--
--     mpirun -n 8 rille tests/pipeline_matrix.lua                 every two values meet
--     mpirun -n 8 rille tests/pipeline_matrix.lua --full K/N      the K-th of N parts of all cases
--     mpirun -n 8 rille tests/pipeline_matrix.lua --full [K-L/N]  the K-th to the L-th; or all
--     mpirun -n 8 rille tests/pipeline_matrix.lua tp ...          the same of tp 2 and 4, not of 1
--     mpirun -n 8 rille tests/pipeline_matrix.lua --case "pp=4 pipeline=zbv stages_per_rank=2 ..."
--
-- The world is cut into teams that run different cases at the same time. A team's first rank also
-- runs the oracle, the same trainer in a group of one: once for all layouts and schedules that it
-- judges in a row. Pipelines alone must give its bits: gradients after the first step, weights
-- after the last, loss, norm, fingerprint. Replicas and tp give them to rounding: |a - b| <= 1e-6
-- (f64: 1e-13) x the model's largest magnitude; in bf16, which is stored but not computed in, so
-- the first gradients of replicas, the rest to bf16's rounding. Initial weights have the same
-- fingerprint under all, and what several ranks hold is the same there, bit for bit, after every
-- step.
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
  { name = "dtype", "f32", "f64", "bf16" },
  { name = "optimizer", "sgd", "adamw" },
}

local function size_of(case) return case.pp * case.dp * case.tp end

local function is_valid(case)
  return (case.m or 1) <= 2 * case.pp + 1 and size_of(case) <= 8
end

local parts_of_schedule = {}

local function finish(case)
  local parts = parts_of_schedule[case.schedule]
  if not parts then
    parts = { case.schedule:match("^(%S+) (%d+)$") }
    parts_of_schedule[case.schedule] = parts
  end
  case.pipeline, case.stages_per_rank = parts[1], math.tointeger(parts[2])
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

-- What one process does is the same for all cases that have this in common.
local function oracle_key(case)
  return table.concat({ units_of(case), samples_of(case), case.dropout, case.tied, case.loss,
    case.clip, case.dtype or "", case.optimizer or "", case.kv_heads }, " ")
end

-- Of these dimensions each case of the whole matrix has one value, in turns: of the number of the
-- case, or of what its oracle does.
local by_number <const> = is_cut and { m = true, clip = true } or {}
local by_oracle <const> = { dtype = true, optimizer = true }

-- Gives the case a value of each of these dimensions, of those that fit, by a number.
local function take_turns(case, names_in_turn, number)
  for k, dimension in ipairs(dimensions) do
    if names_in_turn[dimension.name] then
      local fitting = {}
      for _, value in ipairs(dimension) do
        case[dimension.name] = value
        if is_valid(case) then table.insert(fitting, value) end
      end
      case[dimension.name] = fitting[pipelines.scramble(number, k) % #fitting + 1]
    end
  end
end

-- fn(case, n) for all from dimension k on; n cases were there before. Gives how many there are.
local function each_case(case, k, n, fn)
  local dimension = dimensions[k]
  if not dimension then
    if not is_valid(case) then return n end
    fn(case, n + 1)
    return n + 1
  end
  local name = dimension.name
  if by_number[name] or by_oracle[name] then return each_case(case, k + 1, n, fn) end
  for _, value in ipairs(dimension) do
    case[name] = value
    n = each_case(case, k + 1, n, fn)
  end
  case[name] = nil
  return n
end

-- The number of a case's oracle: what is in turn by it, and the part of the matrix, follow from it.
local numbers = {}
local function oracle_number(case)
  local key = oracle_key(case)
  numbers[key] = numbers[key] or pipelines.scramble(core.hash(key))
  return numbers[key]
end

-- All cases, or those of some parts of as many: cases with the same oracle are in one part.
local function whole_matrix(first, last, parts)
  local list = {}
  each_case({}, 1, 0, function(case, n)
    finish(case)
    if is_cut then take_turns(case, by_number, n) end
    local number = oracle_number(case)
    local part = number % parts + 1
    if part >= first and part <= last then
      local one = {}
      for key, value in pairs(case) do one[key] = value end
      take_turns(one, by_oracle, number)
      table.insert(list, one)
    end
    for name in pairs(is_cut and by_number or {}) do case[name] = nil end
  end)
  return list
end

-- ---- running one

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
  return pipelines.collect(result, not is_oracle and comm or nil, true)
end

local oracle = {} -- the latest: cases that share one come one after the other

local function oracle_of(case)
  local key = oracle_key(case)
  if oracle.key ~= key then oracle = { key = key, result = run(case, alone, true) } end
  return oracle.result
end

-- In units of the largest magnitude. What is stored in bf16 and nearly equal in f32 may differ by
-- a unit in its last place.
local tolerances <const> = { f32 = 1e-6, f64 = 1e-13, bf16 = is_cut and 2 ^ -6 or 1e-6 }
local laters <const> = { bf16 = is_cut and 2 ^ -5 or 2 ^ -7 }

-- Runs a case on a team; its first rank gives words if something differs.
local function check_case(case, team)
  local have = run(case, team, false)
  if team:rank() > 0 then return nil end
  local is_exact = case.dp * case.tp == 1
  local tolerance = is_exact and 0 or tolerances[case.dtype]
  return pipelines.judge(have, oracle_of(case), tolerance,
    { is_adaptive = case.optimizer == "adamw", later = not is_exact and laters[case.dtype] or nil })
end

-- ---- all of them

-- Sizes of teams that run at the same time, as many as there are cores for: what ranks work on
-- leaves the caches when others take turns with them. The world is cut anew for each phase.
local function phases_for(cores)
  local phases = {}
  for _, size in ipairs { 8, 6, 4, 3, 2, 1 } do
    local sizes = {}
    for i = 1, math.max(1, math.min(cores, 8) // size) do sizes[i] = size end
    table.insert(phases, sizes)
  end
  return phases
end

local cores <const> = world:broadcast(("<i8"):pack((select(4, world:place()))), 0)
local phases <const> = phases_for((("<i8"):unpack(cores)))

-- Cases by their oracles, in the order of the first of each; those of one oracle as they came.
local function by_oracles(cases)
  local groups, of_key = {}, {}
  for _, case in ipairs(cases) do
    local key = size_of(case) .. " " .. oracle_key(case)
    if not of_key[key] then
      of_key[key] = {}
      table.insert(groups, of_key[key])
    end
    table.insert(of_key[key], case)
  end
  return groups
end

-- Which team of which phase runs a case: of the teams of its size the one with the fewest takes all
-- that share an oracle.
local function deal(cases)
  local teams, dealt = {}, {}
  for p, sizes in ipairs(phases) do
    dealt[p] = {}
    for t, size in ipairs(sizes) do
      dealt[p][t] = {}
      teams[size] = teams[size] or {}
      table.insert(teams[size], dealt[p][t])
    end
  end
  for _, group in ipairs(by_oracles(cases)) do
    local fewest
    for _, list in ipairs(teams[size_of(group[1])]) do
      if not fewest or #list < #fewest then fewest = list end
    end
    table.move(group, 1, #group, #fewest + 1, fewest)
  end
  return dealt
end

local function guarded(case, team)
  local text = text_of(case)
  core.doing(text)
  local good, words = xpcall(check_case, debug.traceback, case, team)
  if good then return words and { text = text, words = words } end
  -- other ranks wait for this one: the job ends
  error(("not ok case %q: %s"):format(text, words), 0)
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
    local first, last, parts = (what or "1/1"):match("^(%d+)%-?(%d*)/(%d+)$")
    if not first then error("--full takes K/N or K-L/N, not " .. what, 0) end
    first, last, parts = tonumber(first), tonumber(last) or tonumber(first), tonumber(parts)
    local cases = whole_matrix(first, last, parts)
    return cases, ("%d cases, part%s %s"):format(#cases, last > first and "s" or "",
      what or "1/1")
  end
  local cases, covered, n_pairs = pairwise {
    dimensions = dimensions, is_valid = is_valid, seed = 1,
  }
  if covered ~= n_pairs then error(("only %d of %d pairs"):format(covered, n_pairs), 0) end
  for _, case in ipairs(cases) do finish(case) end
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
print("matrix: " .. words)
report(run_all(cases), #cases)
