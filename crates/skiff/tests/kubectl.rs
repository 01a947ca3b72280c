//! A real kubectl against a real server, as a user types it. `UPDATE_EXPECT=1` rewrites the expected
//! output.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use expect_test::{Expect, expect};
use testkit::{Process, Server};

const PORT_MANIFEST: &str = "apiVersion: v1
kind: ConfigMap
metadata: {name: port}
data: {berths: \"3\"}
";

#[test]
fn create_get_edit_and_delete() {
    let Some(server) = start() else { return };
    check(
        &server,
        "
        kubectl create configmap sea --from-literal=depth=10 --from-literal=name=north
        kubectl create configmap sea
        kubectl create deployment web --image=web:1 --replicas=2
        kubectl get configmap sea -o name
        kubectl get deployment web -o wide
        kubectl get configmaps --field-selector metadata.name=sea -o yaml
        kubectl get configmap sea -o json
        kubectl get configmap sea -o jsonpath='{.data.depth}{\"\\n\"}'
        kubectl get configmaps -l '!none' --field-selector metadata.name=sea -o custom-columns=NAME:.metadata.name,DEPTH:.data.depth
        kubectl get configmap sea -o go-template='{{.data.name}}{{\"\\n\"}}'
        kubectl get configmap lake
        kubectl describe configmap sea | sort
        kubectl describe deployment web | grep -v CreationTimestamp
        ",
        expect![[r#"
            $ kubectl create configmap sea --from-literal=depth=10 --from-literal=name=north
            configmap/sea created
            $ kubectl create configmap sea
            error: failed to create configmap: configmaps "sea" already exists
            ? 1
            $ kubectl create deployment web --image=web:1 --replicas=2
            deployment.apps/web created
            $ kubectl get configmap sea -o name
            configmap/sea
            $ kubectl get deployment web -o wide
            NAME   READY   UP-TO-DATE   AVAILABLE   AGE   CONTAINERS   IMAGES   SELECTOR
            web    0/2     0            0           AGE   web          web:1    app=web
            $ kubectl get configmaps --field-selector metadata.name=sea -o yaml
            apiVersion: v1
            items:
            - apiVersion: v1
              data:
                depth: "10"
                name: north
              kind: ConfigMap
              metadata:
                creationTimestamp: TIME
                name: sea
                namespace: default
                resourceVersion: "N"
                uid: UID
            kind: List
            metadata:
              resourceVersion: "N"
            $ kubectl get configmap sea -o json
            {
                "apiVersion": "v1",
                "data": {
                    "depth": "10",
                    "name": "north"
                },
                "kind": "ConfigMap",
                "metadata": {
                    "creationTimestamp": TIME
                    "name": "sea",
                    "namespace": "default",
                    "resourceVersion": "N",
                    "uid": UID
                }
            }
            $ kubectl get configmap sea -o jsonpath='{.data.depth}{"\n"}'
            10
            $ kubectl get configmaps -l '!none' --field-selector metadata.name=sea -o custom-columns=NAME:.metadata.name,DEPTH:.data.depth
            NAME   DEPTH
            sea    10
            $ kubectl get configmap sea -o go-template='{{.data.name}}{{"\n"}}'
            north
            $ kubectl get configmap lake
            Error from server (NotFound): configmaps "lake" not found
            ? 1
            $ kubectl describe configmap sea | sort





            ----
            ----
            10
            ====
            ====
            Annotations:  <none>
            BinaryData
            Data
            Events:  <none>
            Labels:       <none>
            Name:         sea
            Namespace:    default
            depth:
            name:
            north
            $ kubectl describe deployment web | grep -v CreationTimestamp
            Name:                   web
            Namespace:              default
            Labels:                 app=web
            Annotations:            <none>
            Selector:               app=web
            Replicas:               2 desired | 0 updated | 0 total | 0 available | 0 unavailable
            StrategyType:           RollingUpdate
            MinReadySeconds:        0
            RollingUpdateStrategy:  25% max unavailable, 25% max surge
            Pod Template:
              Labels:  app=web
              Containers:
               web:
                Image:         web:1
                Port:          <none>
                Host Port:     <none>
                Environment:   <none>
                Mounts:        <none>
              Volumes:         <none>
              Node-Selectors:  <none>
              Tolerations:     <none>
            Events:            <none>
        "#]],
    );
    check(
        &server,
        "
        kubectl label configmap sea a=b
        kubectl label configmap sea a=c
        kubectl label configmap sea a=c --overwrite
        kubectl get configmap -l a=c --show-labels
        kubectl label configmap sea a-
        kubectl annotate configmap sea note=x
        kubectl patch configmap sea -p '{\"data\":{\"depth\":\"11\"}}'
        kubectl patch configmap sea --type=merge -p '{\"data\":{\"depth\":\"11\"}}'
        kubectl patch configmap sea --type=json -p '[{\"op\":\"replace\",\"path\":\"/data/depth\",\"value\":\"12\"}]'
        EDITOR='sed -i s/north/south/' kubectl edit configmap sea
        EDITOR=true kubectl edit configmap sea
        kubectl get configmap sea -o jsonpath='{.data}{\"\\n\"}'
        kubectl delete configmap sea lake
        kubectl get configmap sea
        ",
        expect![[r#"
            $ kubectl label configmap sea a=b
            configmap/sea labeled
            $ kubectl label configmap sea a=c
            error: 'a' already has a value (b), and --overwrite is false
            ? 1
            $ kubectl label configmap sea a=c --overwrite
            configmap/sea labeled
            $ kubectl get configmap -l a=c --show-labels
            NAME   DATA   AGE   LABELS
            sea    2      AGE   a=c
            $ kubectl label configmap sea a-
            configmap/sea unlabeled
            $ kubectl annotate configmap sea note=x
            configmap/sea annotated
            $ kubectl patch configmap sea -p '{"data":{"depth":"11"}}'
            configmap/sea patched
            $ kubectl patch configmap sea --type=merge -p '{"data":{"depth":"11"}}'
            configmap/sea patched (no change)
            $ kubectl patch configmap sea --type=json -p '[{"op":"replace","path":"/data/depth","value":"12"}]'
            configmap/sea patched
            $ EDITOR='sed -i s/north/south/' kubectl edit configmap sea
            configmap/sea edited
            $ EDITOR=true kubectl edit configmap sea
            Edit cancelled, no changes made.
            $ kubectl get configmap sea -o jsonpath='{.data}{"\n"}'
            {"depth":"12","name":"south"}
            $ kubectl delete configmap sea lake
            configmap "sea" deleted
            Error from server (NotFound): configmaps "lake" not found
            ? 1
            $ kubectl get configmap sea
            Error from server (NotFound): configmaps "sea" not found
            ? 1
        "#]],
    );
}

#[test]
fn apply_scale_and_rollout() {
    let Some(server) = start() else { return };
    check(
        &server,
        "
        kubectl apply -f port.yaml
        kubectl apply -f port.yaml
        sed -i s/3/4/ port.yaml
        kubectl diff -f port.yaml | grep '^[-+] '
        kubectl apply -f port.yaml
        kubectl diff -f port.yaml
        kubectl apply --server-side -f port.yaml
        sed -i s/4/5/ port.yaml
        kubectl apply --server-side --field-manager=other -f port.yaml
        kubectl apply --server-side --field-manager=other --force-conflicts -f port.yaml
        kubectl replace -f port.yaml
        kubectl get -f port.yaml -o jsonpath='{.data.berths}{\"\\n\"}'
        kubectl delete -f port.yaml
        kubectl wait --for=delete configmap/port --timeout=20s
        kubectl replace -f port.yaml
        ",
        expect![[r#"
            $ kubectl apply -f port.yaml
            configmap/port created
            $ kubectl apply -f port.yaml
            configmap/port unchanged
            $ sed -i s/3/4/ port.yaml
            $ kubectl diff -f port.yaml | grep '^[-+] '
            -  berths: "3"
            +  berths: "4"
            $ kubectl apply -f port.yaml
            configmap/port configured
            $ kubectl diff -f port.yaml
            $ kubectl apply --server-side -f port.yaml
            configmap/port serverside-applied
            $ sed -i s/4/5/ port.yaml
            $ kubectl apply --server-side --field-manager=other -f port.yaml
            error: Apply failed with 1 conflict: conflict with "kubectl": .data.berths
            Please review the fields above--they currently have other managers. Here
            are the ways you can resolve this warning:
            * If you intend to manage all of these fields, please re-run the apply
              command with the `--force-conflicts` flag.
            * If you do not intend to manage all of the fields, please edit your
              manifest to remove references to the fields that should keep their
              current managers.
            * You may co-own fields by updating your manifest to match the existing
              value; in this case, you'll become the manager if the other manager(s)
              stop managing the field (remove it from their configuration).
            See https://kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts
            ? 1
            $ kubectl apply --server-side --field-manager=other --force-conflicts -f port.yaml
            configmap/port serverside-applied
            $ kubectl replace -f port.yaml
            configmap/port replaced
            $ kubectl get -f port.yaml -o jsonpath='{.data.berths}{"\n"}'
            5
            $ kubectl delete -f port.yaml
            configmap "port" deleted
            $ kubectl wait --for=delete configmap/port --timeout=20s
            $ kubectl replace -f port.yaml
            Error from server (NotFound): error when replacing "port.yaml": configmaps "port" not found
            ? 1
        "#]],
    );
    check(
        &server,
        "
        kubectl create deployment web --image=web:1
        kubectl scale deployment web --replicas=3
        kubectl scale deployment web --replicas=5 --current-replicas=9
        kubectl wait --for=jsonpath='{.spec.replicas}'=3 deployment/web --timeout=20s
        kubectl wait --for=condition=Available deployment/web --timeout=0s
        kubectl set image deployment/web web=web:2
        kubectl set env deployment/web A=b
        kubectl get deployment web -o jsonpath='{.metadata.generation} {.spec.template.spec.containers[0].image}{\"\\n\"}'
        kubectl rollout history deployment/web
        kubectl rollout pause deployment/web
        kubectl rollout pause deployment/web
        kubectl rollout resume deployment/web
        kubectl expose deployment web --port=80 --cluster-ip=None
        kubectl get service web
        kubectl run one --image=web:1
        kubectl get pod one
        kubectl logs one
        kubectl exec one -- ls
        kubectl delete pod one
        kubectl events
        kubectl delete deployment,service web
        ",
        expect![[r#"
            $ kubectl create deployment web --image=web:1
            deployment.apps/web created
            $ kubectl scale deployment web --replicas=3
            deployment.apps/web scaled
            $ kubectl scale deployment web --replicas=5 --current-replicas=9
            error: Expected replicas to be 9, was 3
            ? 1
            $ kubectl wait --for=jsonpath='{.spec.replicas}'=3 deployment/web --timeout=20s
            deployment.apps/web condition met
            $ kubectl wait --for=condition=Available deployment/web --timeout=0s
            error: condition not met for deployments/web
            ? 1
            $ kubectl set image deployment/web web=web:2
            deployment.apps/web image updated
            $ kubectl set env deployment/web A=b
            deployment.apps/web env updated
            $ kubectl get deployment web -o jsonpath='{.metadata.generation} {.spec.template.spec.containers[0].image}{"\n"}'
            4 web:2
            $ kubectl rollout history deployment/web
            deployment.apps/web
            No rollout history found.
            $ kubectl rollout pause deployment/web
            deployment.apps/web paused
            $ kubectl rollout pause deployment/web
            error: deployments.apps "web" is already paused
            ? 1
            $ kubectl rollout resume deployment/web
            deployment.apps/web resumed
            $ kubectl expose deployment web --port=80 --cluster-ip=None
            service/web exposed
            $ kubectl get service web
            NAME   TYPE        CLUSTER-IP   EXTERNAL-IP   PORT(S)   AGE
            web    ClusterIP   None         <none>        80/TCP    AGE
            $ kubectl run one --image=web:1
            pod/one created
            $ kubectl get pod one
            NAME   READY   STATUS    RESTARTS   AGE
            one    0/1     Pending   0          AGE
            $ kubectl logs one
            $ kubectl exec one -- ls
            Error from server (BadRequest): pod one does not have a host assigned
            ? 1
            $ kubectl delete pod one
            pod "one" deleted
            $ kubectl events
            No events found in default namespace.
            $ kubectl delete deployment,service web
            deployment.apps "web" deleted
            service "web" deleted
        "#]],
    );
}

#[test]
fn discovery_explain_and_auth() {
    let Some(server) = start() else { return };
    check(
        &server,
        "
        kubectl api-resources --api-group=apps
        kubectl api-resources --namespaced=false --verbs=delete -o name | head -4
        kubectl api-versions
        kubectl explain pod.spec.restartPolicy
        kubectl explain deployments.spec --recursive | head -12
        kubectl explain configmap.nothing
        kubectl auth can-i create pods
        kubectl auth can-i create pods --as=guest
        kubectl auth whoami | sed -E 's/=[0-9a-f]{64}/=DIGEST/'
        kubectl cluster-info | head -1
        kubectl version 2>/dev/null | grep Server
        kubectl get --raw /readyz
        kubectl get --raw /nothing
        kubectl get boats
        kubectl top pods
        ",
        expect![[r#"
            $ kubectl api-resources --api-group=apps
            NAME                  SHORTNAMES   APIVERSION   NAMESPACED   KIND
            controllerrevisions                apps/v1      true         ControllerRevision
            daemonsets            ds           apps/v1      true         DaemonSet
            deployments           deploy       apps/v1      true         Deployment
            replicasets           rs           apps/v1      true         ReplicaSet
            statefulsets          sts          apps/v1      true         StatefulSet
            $ kubectl api-resources --namespaced=false --verbs=delete -o name | head -4
            namespaces
            nodes
            persistentvolumes
            mutatingadmissionpolicies.admissionregistration.k8s.io
            $ kubectl api-versions
            admissionregistration.k8s.io/v1
            apiextensions.k8s.io/v1
            apiregistration.k8s.io/v1
            apps/v1
            authentication.k8s.io/v1
            authorization.k8s.io/v1
            autoscaling/v1
            autoscaling/v2
            batch/v1
            certificates.k8s.io/v1
            coordination.k8s.io/v1
            discovery.k8s.io/v1
            events.k8s.io/v1
            flowcontrol.apiserver.k8s.io/v1
            networking.k8s.io/v1
            node.k8s.io/v1
            policy/v1
            rbac.authorization.k8s.io/v1
            resource.k8s.io/v1
            scheduling.k8s.io/v1
            storage.k8s.io/v1
            v1
            $ kubectl explain pod.spec.restartPolicy
            KIND:       Pod
            VERSION:    v1

            FIELD: restartPolicy <string>
            ENUM:
                Always
                Never
                OnFailure

            DESCRIPTION:
                Restart policy for all containers within the pod. One of Always, OnFailure,
                Never. In some contexts, only a subset of those values may be permitted.
                Default to Always. More info:
                https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy


            $ kubectl explain deployments.spec --recursive | head -12
            GROUP:      apps
            KIND:       Deployment
            VERSION:    v1

            FIELD: spec <DeploymentSpec>


            DESCRIPTION:
                Specification of the desired behavior of the Deployment.
                DeploymentSpec is the specification of the desired behavior of the
                Deployment.

            $ kubectl explain configmap.nothing
            KIND:       ConfigMap
            VERSION:    v1

            error: field "nothing" does not exist
            ? 1
            $ kubectl auth can-i create pods
            yes
            $ kubectl auth can-i create pods --as=guest
            no
            ? 1
            $ kubectl auth whoami | sed -E 's/=[0-9a-f]{64}/=DIGEST/'
            ATTRIBUTE                                           VALUE
            Username                                            system:admin
            Groups                                              [system:masters system:authenticated]
            Extra: authentication.kubernetes.io/credential-id   [X509SHA256=DIGEST]
            $ kubectl cluster-info | head -1
            Kubernetes control plane is running at URL
            $ kubectl version 2>/dev/null | grep Server
            Server Version: v1.36.4
            $ kubectl get --raw /readyz
            ok
            $ kubectl get --raw /nothing
            Error from server (NotFound): the server could not find the requested resource
            ? 1
            $ kubectl get boats
            error: the server doesn't have a resource type "boats"
            ? 1
            $ kubectl top pods
            error: Metrics API not available
            ? 1
        "#]],
    );
}

#[test]
fn kubectl_proxy_passes_requests() {
    let Some(server) = start() else { return };
    let mut command = Command::new("kubectl");
    command.args(["proxy", "--port=0"]).env("KUBECONFIG", server.kubeconfig()).env("HOME", server.data_dir());
    let mut proxy = Process::spawn(&mut command).unwrap();
    let address = proxy
        .wait_until_log(Duration::from_secs(30), |log| {
            Some(log.lines().next()?.strip_prefix("Starting to serve on ")?.to_owned())
        })
        .unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .write_all(b"GET /api/v1/namespaces/default HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("kubernetes.io/metadata.name"), "{answer}");
}

fn start() -> Option<Server> {
    if !testkit::has_kubectl() {
        println!("skipped: no kubectl");
        return None;
    }
    let server = Server::start();
    std::fs::write(server.kubeconfig().with_file_name("port.yaml"), PORT_MANIFEST).unwrap();
    Some(server)
}

/// Runs the commands one after another and compares the transcript. Values that differ between runs are
/// replaced by placeholders.
#[track_caller]
fn check(server: &Server, lines: &str, expected: Expect) {
    let mut transcript = String::new();
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let folder = server.kubeconfig().parent().unwrap().to_owned();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec 2>&1; {line}")]).current_dir(&folder);
        command.env("KUBECONFIG", server.kubeconfig()).env("HOME", &folder);
        let output = command.output().unwrap();
        transcript.push_str(&format!("$ {line}\n"));
        for line in String::from_utf8_lossy(&output.stdout).replace(&server.url(), "URL").lines() {
            transcript.push_str(&normalize(line));
            transcript.push('\n');
        }
        if let Some(code @ 1..) = output.status.code() {
            transcript.push_str(&format!("? {code}\n"));
        }
    }
    expected.assert_eq(&transcript);
}

/// Replaces ages, times, UIDs and versions in a line, and keeps the columns aligned.
fn normalize(line: &str) -> String {
    let mut normalized = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let start = rest.len() - rest.trim_start().len();
        normalized.push_str(&rest[..start]);
        rest = &rest[start..];
        let word = &rest[..rest.find(' ').unwrap_or(rest.len())];
        rest = &rest[word.len()..];
        let replacement = match placeholder_for(word) {
            _ if normalized.trim_end().ends_with("resourceVersion\":") => "\"N\",",
            _ if normalized.trim_end().ends_with("resourceVersion:") => "\"N\"",
            Some(replacement) => replacement,
            None => word,
        };
        normalized.push_str(replacement);
        let spaces = rest.len() - rest.trim_start().len();
        if spaces > 1 && replacement != word {
            normalized.push_str(&" ".repeat((word.len() + spaces).saturating_sub(replacement.len())));
            rest = rest.trim_start();
        }
    }
    normalized.trim_end().to_owned()
}

fn placeholder_for(word: &str) -> Option<&'static str> {
    let bare = word.trim_matches(['"', ',']);
    let is_age =
        bare.ends_with('s') && bare.trim_end_matches('s').split('m').all(|part| part.parse::<u32>().is_ok());
    let is_uid = bare.len() == 36 && bare.bytes().filter(|byte| *byte == b'-').count() == 4;
    let is_time = bare.len() == 20 && bare.ends_with('Z') && bare.as_bytes()[10] == b'T';
    match () {
        () if is_age => Some("AGE"),
        () if is_uid => Some("UID"),
        () if is_time => Some("TIME"),
        () => None,
    }
}
