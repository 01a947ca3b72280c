mod world;

use expect_test::{Expect, expect};
use proptest::prelude::*;
use world::World;

#[track_caller]
fn check(world: &World, expected: Expect) {
    expected.assert_eq(&world.told);
}

#[test]
fn a_rolling_update_goes_step_by_step() {
    let mut world = World::new(4, "1", "1");
    world.settle();
    check(
        &world,
        expect![[r#"
            create a 0->4 revision=1
            status replicas=0 updated=0 available=0 unavailable=4 Progressing=True/NewReplicaSetCreated Available=False/MinimumReplicasUnavailable
            status replicas=4 updated=4 available=0 unavailable=4 Available=False/MinimumReplicasUnavailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=1 unavailable=3 Available=False/MinimumReplicasUnavailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=2 unavailable=2 Available=False/MinimumReplicasUnavailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=3 unavailable=1 Available=True/MinimumReplicasAvailable Progressing=True/ReplicaSetUpdated
            status replicas=4 updated=4 available=4 unavailable=0 Available=True/MinimumReplicasAvailable Progressing=True/NewReplicaSetAvailable
        "#]],
    );
    world.quiet().template("b").settle();
    check(
        &world,
        expect![[r#"
            create b 0->1 revision=2
            scale a 4->3
            scale b 1->2
            scale a 3->2
            scale b 2->3
            scale a 2->1
            scale b 3->4
            scale a 1->0
        "#]],
    );
    // Back again: the first set has its second turn.
    world.template("a").settle();
    assert_eq!(world.annotation("a", "revision"), "3");
    assert_eq!(world.annotation("a", "revision-history"), "1");
    assert_eq!(world.annotation("", "revision"), "3");
}

#[test]
fn without_surge_old_pods_go_first() {
    let mut world = World::new(3, "0", "1");
    world.settle().quiet().template("b").settle();
    check(
        &world,
        expect![[r#"
        create b 0->0 revision=2
        scale a 3->2
        scale b 0->1
        scale a 2->1
        scale b 1->2
        scale a 1->0
        scale b 2->3
    "#]],
    );
}

#[test]
fn percentages_that_come_to_nothing_still_leave_room() {
    let mut world = World::new(1, "0%", "10%");
    world.settle().quiet().template("b").settle();
    check(
        &world,
        expect![[r#"
        create b 0->0 revision=2
        scale a 1->0
        scale b 0->1
    "#]],
    );
}

#[test]
fn a_broken_template_stops_the_rollout_and_is_rolled_over() {
    let mut world = World::new(4, "25%", "25%");
    world.settle().quiet().template("bad").settle();
    check(
        &world,
        expect![[r#"
        create bad 0->1 revision=2
        scale a 4->3
        scale bad 1->2
    "#]],
    );
    world.quiet().template("b").settle();
    check(
        &world,
        expect![[r#"
            create b 0->0 revision=3
            scale bad 2->0
            scale b 0->2
            scale a 3->2
            scale b 2->3
            scale a 2->1
            scale b 3->4
            scale a 1->0
        "#]],
    );
}

#[test]
fn recreating_waits_for_the_last_old_pod() {
    let mut world = World::new(2, "0", "0");
    world.recreate().settle().quiet().template("b");
    world.control();
    world.control();
    check(
        &world,
        expect![[r#"
        scale a 2->0
    "#]],
    );
    world.settle();
    check(
        &world,
        expect![[r#"
        scale a 2->0
        create b 0->2 revision=2
    "#]],
    );
}

#[test]
fn scaling_keeps_proportions_in_the_middle_of_a_rollout() {
    let mut world = World::new(10, "3", "2");
    world.settle().template("bad").settle().quiet();
    assert_eq!(world.sizes(), "bad=5 a=8");
    world.replicas(15).settle();
    check(
        &world,
        expect![[r#"
        scale a 8->11
        scale bad 5->7
    "#]],
    );
    world.quiet().replicas(5).control();
    assert_eq!(world.sizes(), "bad=3 a=5");
    world.settle();
    world.replicas(0).settle();
    assert_eq!(world.sizes(), "bad=0 a=0");
}

#[test]
fn a_paused_deployment_scales_but_does_not_roll_out() {
    let mut world = World::new(2, "1", "0");
    world.settle().paused(true).template("b").settle();
    assert_eq!(world.sizes(), "a=2");
    assert_eq!(world.condition("Progressing"), "Unknown/DeploymentPaused Deployment is paused");
    world.replicas(3).settle();
    assert_eq!(world.sizes(), "a=3");
    world.paused(false).control();
    assert_eq!(world.sizes(), "b=1 a=3");
    world.settle();
    assert_eq!(world.sizes(), "b=3 a=0");
}

#[test]
fn only_so_many_old_sets_are_kept() {
    let mut world = World::new(1, "1", "0");
    world.history(2).settle();
    for template in ["b", "c", "d", "e"] {
        world.template(template).settle();
    }
    assert_eq!(world.sizes(), "e=1 c=0 d=0");
    world.history(0).settle();
    assert_eq!(world.sizes(), "e=1");
}

#[test]
fn a_lack_of_progress_is_told_once() {
    let mut world = World::new(1, "1", "0");
    world.settle().template("bad").settle().quiet();
    assert!(world.condition("Progressing").starts_with("True/ReplicaSetUpdated ReplicaSet \"web-"));
    assert_eq!(
        world.next.expect("a deadline"),
        world.now.checked_add(jiff::SignedDuration::from_secs(600)).expect("a time")
    );
    world.pass(601).settle();
    let told = world.condition("Progressing");
    assert!(told.starts_with("False/ProgressDeadlineExceeded ReplicaSet \"web-"), "{told}");
    assert!(told.ends_with("has timed out progressing."), "{told}");
    assert_eq!(world.next, None);
    world.template("b").settle();
    assert!(world.condition("Progressing").starts_with("True/NewReplicaSetAvailable"));
}

#[test]
fn a_rollback_is_carried_out_and_forgotten() {
    let mut world = World::new(1, "1", "0");
    world.settle().template("b").settle();
    world.annotate("deprecated.deployment.rollback.to", "0").settle();
    assert_eq!(world.sizes(), "a=1 b=0");
    assert_eq!(world.annotation("", "revision"), "3");
    world.quiet().annotate("deprecated.deployment.rollback.to", "7").control();
    world.annotate("deprecated.deployment.rollback.to", "3").control();
    check(
        &world,
        expect![[r#"
        tell DeploymentRollbackRevisionNotFound Unable to find the revision to rollback to.
        write a
        tell DeploymentRollbackTemplateUnchanged The rollback revision contains the same template as current deployment "web"
        write a
    "#]],
    );
}

#[test]
fn annotations_follow_the_deployment() {
    let mut world = World::new(1, "1", "0");
    world.settle().annotate("kubernetes.io/change-cause", "why").settle();
    assert_eq!(world.annotation("a", "change-cause"), "why");
    assert_eq!(world.annotation("a", "desired-replicas"), "1");
    assert_eq!(world.annotation("a", "max-replicas"), "2");
}

#[test]
fn names_fit_and_differ_after_a_collision() {
    let mut deployment = World::new(1, "1", "0").deployment;
    let name = |deployment: &super::Deployment| match &super::plan(
        deployment,
        &[],
        |_| false,
        jiff::Timestamp::UNIX_EPOCH,
    )[..]
    {
        [super::Action::CreateSet(set), ..] => set.metadata.name.clone().expect("a name"),
        other => panic!("{other:?}"),
    };
    let before = name(&deployment);
    assert_ne!(before, name(&super::collided(&deployment)));
    assert!(before.strip_prefix("web-").is_some_and(|hash| (5..=10).contains(&hash.len())));
    deployment.metadata.name = Some("x".repeat(253));
    assert_eq!(name(&deployment).len(), 253);
}

#[derive(Clone, Debug)]
enum Step {
    Control,
    Sets(usize),
    Pod(usize),
    Break(usize),
    Template(usize),
    Replicas(i32),
    Paused(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => Just(Step::Control),
        6 => (0..4_usize).prop_map(Step::Sets),
        6 => (0..4_usize).prop_map(Step::Pod),
        1 => (0..4_usize).prop_map(Step::Break),
        1 => (0..4_usize).prop_map(Step::Template),
        1 => (0..12_i32).prop_map(Step::Replicas),
        1 => any::<bool>().prop_map(Step::Paused),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever happens and in whatever order, no step makes more pods than the surge allows or takes away
    /// more than may be missing, and in the end all pods are new and nothing is left to do.
    #[test]
    fn rollouts_stay_within_their_limits_and_end(
        replicas in 0..12_i32,
        surge in prop_oneof![Just("0"), Just("1"), Just("3"), Just("25%"), Just("100%")],
        unavailable in prop_oneof![Just("0"), Just("1"), Just("2"), Just("25%"), Just("50%")],
        recreate in prop::bool::weighted(0.2),
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut world = World::new(replicas, surge, unavailable);
        if recreate {
            world.recreate();
        }
        for step in steps {
            match step {
                Step::Control => world.control_checked(),
                Step::Sets(i) => world.keep_set(i),
                Step::Pod(i) => world.start_pod(i),
                Step::Break(i) => world.break_pod(i),
                Step::Template(i) => _ = world.template(["a", "b", "bad", "c"][i]),
                Step::Replicas(replicas) => _ = world.replicas(replicas),
                Step::Paused(paused) => _ = world.paused(paused),
            }
        }
        world.paused(false).template("end").settle();
        let replicas = world.limits().replicas;
        for (template, size) in world.sizes().split(' ').filter_map(|word| word.split_once('=')) {
            prop_assert_eq!(size, if template == "end" { replicas.to_string() } else { "0".to_owned() });
        }
        prop_assert!(super::status::is_complete(&world.deployment, world.deployment.status.as_ref()));
        world.quiet();
        world.told.clear();
        world.control();
        prop_assert_eq!(&world.told, "");
    }
}
